"""Tests the comparison of methods at equal numbers of drafted tokens.

The whole comparison runs at toy size, and its parts run where the answer is known.
"""

import itertools
import json

import jax
import numpy as np
import pytest

from helpers import stopping
from spectr_jax import transport
from spectr_jax.decoding import get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import METHODS
from spectr_jax.decoding.tree import batch, chain, optimal_order, parse, tree_of
from spectr_jax.experiments import trees
from spectr_jax.experiments.config import trees_config
from spectr_jax.experiments.figures import ersd
from spectr_jax.experiments.measure.acceptance import (
    Nodes,
    PairAcceptance,
    observe_drafts,
    observe_nodes,
)
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.planning import tree_search
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.transport import race
from spectr_jax.utils.errors import UserError

IID = [name for name in METHODS if tree_search.statistic(get_method(name)) == "carriers"]
TABLE = random_table(0, 4)
DRAFT = perturbed(TABLE, 1, 0.8)
MEASURED = ("speculative", "gsd", "ersd", "greedy_drafts")
"""The methods of the toy table, which cover each kind of drafts and of verifiers."""
P, Q, SEQUENCES = DRAFT[1, 2], TABLE[1, 2], 20_000


def _config(folder, **changes):
    config = trees_config()
    config.update(
        {
            "target": str(folder / "target.safetensors"),
            "draft": str(folder / "draft.safetensors"),
            "prompts": str(folder / "prompts.txt"),
            "num_prompts": 5,
            "batch_size": 4,
            "max_new_tokens": 5,
            "seeds": (0, 1),
            "sizes": (1,),  # All shapes of one node are the same tree: one program per method.
            "draft_length": 1,
            "extra_trees": ("1",),
            "exit_layer": 0,
            **changes,
        }
    )
    return config


@pytest.mark.slow
def test_a_stopped_run_resumes_and_writes_table_and_figures(toy, tmp_path, monkeypatch):
    """The run is stopped while it measures acceptance and rows, and resumes each time."""
    config = _config(toy.folder, methods=MEASURED)
    monkeypatch.setattr(Bench, "run", stopping(Bench.run, [], 9, 24))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            trees.run(config, tmp_path)
    assert len((tmp_path / "trees.part.jsonl").read_text().splitlines()) > 14
    result = trees.run(config, tmp_path)
    assert not (tmp_path / "trees.part.jsonl").exists()
    assert json.loads((tmp_path / "trees.json").read_text()) == result
    methods = [row["method"] for row in result["rows"]]
    assert set(methods) == {"baseline", *MEASURED}
    for row in result["rows"]:
        assert row["nodes"] <= row["size"] and 1 <= row["tokens_per_call"] <= row["levels"] + 1
        assert row["tokens_per_second"] > 0 and row["speedup"] > 0
    lines = (tmp_path / "trees.md").read_text().splitlines()
    table = [line.split("|") for line in lines if line[:1] == "|"][2:]
    assert [cells[2].strip() for cells in table] == methods
    assert lines[2] == result["answer"]
    for name in (
        "ersd_figure_3.png",
        "ersd_figure_4.png",
        "optimal_tree_gsd.png",
        "optimal_tree_ersd.png",
    ):
        assert (tmp_path / name).stat().st_size > 5_000


def test_the_comparison_has_every_method_with_a_draft_model():
    """A method that is added to the library must be added to the config, too."""
    assert {name for name in METHODS if get_method(name).needs_draft} == {*trees_config().methods}


def _synthetic(size):
    """Returns acceptance with geometric R, nodes that follow R on two seeds, and carriers."""
    R = {
        name: [a * 0.3**rank for rank in range(size)] for name, a in (("gsd", 0.65), ("ersd", 0.6))
    }
    nodes = {}
    for name, pmf in R.items():
        for shape in ersd.STRATEGIES:
            paths = optimal_order(pmf, size) if shape == "optimal" else None
            tree = trees._fixed_shapes(size)[shape] if paths is None else tree_of(paths)
            paths = paths or [tree.path(node) for node in range(1, size + 1)]
            accepted = np.array([np.prod([pmf[rank] for rank in path]) for path in paths])
            nodes[name, shape] = Nodes(paths, np.array([accepted, accepted]))
    table = np.zeros((size + 1, size + 1))
    table[0, 0] = 1
    for k in range(1, size + 1):
        table[k, 0], table[k, 1] = 0.3 / k, 1 - 0.3 / k
    return PairAcceptance(R, nodes, dict.fromkeys(IID, table), 0.5)


def test_table_rows_match_their_trees_and_sizes(toy):
    config = _config(
        toy.folder, sizes=(16, 8), draft_length=4, extra_trees=("2,1,1,1", "4,2"), exit_layer=1
    )
    acceptance = _synthetic(16)
    rows = trees.table_rows(config, acceptance)
    assert [row.size for row in rows] == sorted(row.size for row in rows)
    for row in rows[1:]:
        assert row.method.tree.size <= row.size
        if row.method.name in ("speculative", "block", "gsd", "ersd"):
            assert row.method.tree.size == row.size
        if row.method.name in ("gsd", "ersd"):
            best = next(
                r
                for r in rows
                if r[:2] == (row.size, "optimal") and r.method.name == row.method.name
            )
            assert row.theory <= best.theory + 1e-12
    # The tree (4,2) has 12 nodes, so it does not fit size 8.
    assert {row.size for row in rows if row.shape.startswith("(4,2)")} == {16}
    named = [row for row in rows if row.shape.startswith("(")]  # Commands take these names.
    assert named and all(
        parse(row.shape[1 : row.shape.index(")")]).parents == row.method.tree.parents
        for row in named
    )
    assert len({(row.size, row.method) for row in rows}) == len(rows)


def test_points_of_known_acceptance_lie_on_the_theory_curves():
    acceptance = _synthetic(12)
    for figure in (ersd.figure_3(acceptance, 100), ersd.figure_4(acceptance, 100)):
        for panel in range(2):
            curves = {
                each.label: each
                for each in figure.series
                if each.error is None and each.panel == panel
            }
            points = [
                each for each in figure.series if each.error is not None and each.panel == panel
            ]
            assert len(points) >= 3
            for series in points:
                curve = dict(zip(curves[series.like].x, curves[series.like].y, strict=True))
                np.testing.assert_allclose(series.y, [curve[x] for x in series.x], atol=1e-12)
    bounds = [
        each for each in ersd.figure_3(acceptance, 100).series if each.label.startswith("Lemma")
    ]
    best = [each for each in ersd.figure_3(acceptance, 100).series if each.label == "optimal tree"]
    for bound in bounds:
        assert np.all(np.array(bound.y) >= np.array(best[bound.panel].y) - 1e-9)


def _observed(method, tree, observe, max_new_tokens=1):
    models = TableModel(TABLE), TableModel(DRAFT)
    prompts, lengths = np.tile([1, 2], (SEQUENCES, 1)), np.full(SEQUENCES, 2)
    method = get_method(method, tree=tree)
    result = generate(
        jax.random.key(0), method, *models, prompts, lengths, max_new_tokens, observe=observe
    )
    return {
        name: np.sum(np.asarray(values, float), axis=0) for name, values in result.observed.items()
    }


def test_acceptance_by_child_index_matches_the_exact_pmf():
    seen = _observed("ersd", batch(3), observe_nodes)
    R = race.index_pmf(P, Q, 3)
    assert seen["nodes"][0] == SEQUENCES
    np.testing.assert_allclose(seen["nodes"][1:] / SEQUENCES, R, atol=4 * np.sqrt(0.25 / SEQUENCES))
    assert seen["kl"] / SEQUENCES == pytest.approx(np.sum(Q * np.log2(Q / P)), abs=1e-5)


def test_acceptance_along_a_chain_is_a_product():
    seen = _observed("gsd", chain(2), observe_nodes)
    first = np.minimum(P, Q).sum()
    second = sum(min(P[x], Q[x]) * np.minimum(DRAFT[2, x], TABLE[2, x]).sum() for x in range(4))
    np.testing.assert_allclose(
        seen["nodes"][1:] / SEQUENCES, [first, second], atol=4 * np.sqrt(0.25 / SEQUENCES)
    )


@pytest.mark.slow
def test_observed_carriers_of_iid_drafts_are_exact():
    """One run observes all plans on the same drafts."""
    methods = tuple(map(get_method, ("spectr", "otm", "gbv_conditional")))
    counts = _observed("otm", batch(3), observe_drafts(methods))
    assert observe_drafts(methods) is observe_drafts(methods)
    counts = {method.verifier.plan.name: counts[method.name] for method in methods}
    for name, k in itertools.product(counts, range(4)):
        exact = np.zeros(4)
        for drafts in np.ndindex(*[4] * k):
            pmf = transport.get(name).pmf(P, Q, drafts) if k else Q
            for token in range(4):
                exact[drafts.count(token)] += np.prod(P[list(drafts)]) * pmf[token]
        np.testing.assert_allclose(
            counts[name][k] / SEQUENCES, exact, atol=4 * np.sqrt(0.25 / SEQUENCES)
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": (0,)}, "sizes=0: must be at least 1"),
        ({"extra_trees": ("star:3",)}, "tree='star:3'"),
        ({"extra_trees": ("specinfer:9",), "sizes": (16,)}, "prefix tree"),
        ({"extra_trees": ("4,4",)}, "extra_trees='4,4': has 20 nodes"),
        ({"methods": ("baseline",)}, "methods='baseline'"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"exit_layer": 1}, "exit_layer=1"),
        ({"exit_layer": -1}, "exit_layer=-1"),
        ({"num_prompts": 10}, "num_prompts=10"),
        ({"sizes": (400,)}, "sizes=400: must not exceed the vocabulary of 283 tokens"),
    ],
)
def test_bad_configs_are_refused_before_any_work(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        trees.run(_config(toy.folder, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
