"""Tests the comparison of methods on the same i.i.d. drafts, and its optimum."""

import itertools
import pathlib

import jax
import numpy as np
import pytest

from helpers import stopping
from spectr_jax import transport
from spectr_jax.decoding import get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.tree import none, prefix_tree
from spectr_jax.experiments import frontier
from spectr_jax.experiments.config import frontier_config
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.planning.optimum import drafted_trees, most_tokens
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.utils.errors import UserError

TARGET = random_table(0, 4)
DRAFT = perturbed(TARGET, 1, 0.8)


def _config(folder, **changes):
    config = frontier_config()
    config.update(
        {
            "target": str(folder / "target.safetensors"),
            "draft": str(folder / "draft.safetensors"),
            "prompts": str(folder / "prompts.txt"),
            "num_prompts": 5,
            "batch_size": 4,
            "max_new_tokens": 5,
            "seeds": (0,),
            "methods": ("spectr", "gbv"),
            "paths": (1, 2),
            "draft_length": 2,
            "stems": (0, 1),
            "policies": ((0.6, 0.9),),
            "contexts": 2,
            "calls": 200,
            **changes,
        }
    )
    return config


def _after(table):
    """Returns the distribution of the token after a sequence that follows the prompt (1, 2)."""
    return lambda sequence: table[(1, 2, *sequence)[-2:]]


P, Q = _after(DRAFT), _after(TARGET)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_optimum_for_one_token_is_that_of_transport(k):
    best = transport.get("otm").exact_acceptance(P(()), Q(()), k)
    assert most_tokens(P, Q, prefix_tree(k)) == pytest.approx(1 + best, abs=1e-8)


def test_the_optimum_on_a_chain_is_block_verification():
    tokens = 1.0
    for length in (1, 2, 3):
        for drafts in itertools.product(range(4), repeat=length):
            probability = score = 1.0
            for depth, token in enumerate(drafts):
                p, q = P(drafts[:depth])[token], Q(drafts[:depth])[token]
                probability, score = probability * p, min(1, score * q / p)
            tokens += probability * score
    assert most_tokens(P, Q, prefix_tree(1, 1, 1)) == pytest.approx(tokens, abs=1e-8)


def test_the_optimum_sees_each_set_of_drafts_once():
    drafted = drafted_trees(P, prefix_tree(2, 1))
    assert sum(drafted.values()) == pytest.approx(1)
    # Two chains of two tokens: 16 equal pairs, and 16 * 15 / 2 pairs without order.
    assert len(drafted) == 16 + 120
    with pytest.raises(UserError, match="tree of 16 nodes"):
        most_tokens(P, Q, prefix_tree(16))
    one = np.eye(4)[0]  # Tokens that cannot be drafted are not enumerated.
    assert most_tokens(lambda _: one, lambda _: one, prefix_tree(16)) == pytest.approx(2)
    assert most_tokens(P, Q, none()) == 1


@pytest.mark.parametrize("stem", [0, 1])
def test_first_paths_have_their_tokens_and_distributions(stem):
    """Each node keeps the token, the logits and, if it has children, the p of its path."""
    tree, part = (prefix_tree(*[1] * stem, k, *[1] * (2 - stem)) for k in (3, 2))
    whole = {}

    def observe(call):
        scored = call.scored
        some = frontier.first_paths(scored, part)
        for name, each in (("whole", scored), ("part", some)):
            whole[name] = each.tokens, each.logits, each.p
        return dict(whole)

    models = TableModel(TARGET), TableModel(DRAFT)
    method, prompts = get_method("spectr", tree=tree), np.array([[1, 2]])
    out = generate(jax.random.key(0), method, *models, prompts, np.array([2]), 1, observe=observe)
    seen = {name: [np.asarray(array)[0] for array in out.observed[name]] for name in whole}
    number = {tree.path(node): node for node in range(tree.size + 1)}
    rows = [number[part.path(node)] for node in range(part.size + 1)]
    ranks = [tree.inner_rank[rows[node]] for node in part.inner]
    for each, where in zip(range(3), (rows, rows, ranks), strict=True):
        np.testing.assert_array_equal(seen["part"][each], seen["whole"][each][where])


def _everything(name):
    """Returns the distributions that `observe_limited` sees of one pair of tables."""
    method = get_method("gsd", tree=prefix_tree(frontier.SUPPORT, frontier.SUPPORT))
    models = (TableModel(TARGET), TableModel(DRAFT))
    arguments = np.array([[1, 2]]), np.array([2]), 1
    observe = frontier.observe_limited
    return generate(jax.random.key(3), method, *models, *arguments, observe=observe).observed[name]


def _pairs(p, q):
    """Returns the set of (p, q) of the tokens."""
    return {(round(float(a), 5), round(float(b), 5)) for a, b in zip(p, q, strict=True)}


def test_limited_distributions_are_those_of_the_models():
    """Their tokens have no names, but each pair (p, q) belongs to one token."""
    p, q = (np.asarray(_everything(name))[0] for name in "pq")
    assert _pairs(p[0], q[0]) < _pairs(P(()), Q(()))
    for value, *rows in zip(p[0], p[1:], q[1:], strict=True):
        token = int(np.argmin(abs(P(()) - value)))
        assert _pairs(*rows) < _pairs(P((token,)), Q((token,)))
    draft, target = frontier.tables_of(p, q)
    np.testing.assert_allclose(draft.sum(-1), 1)
    np.testing.assert_allclose(target[-1, -1], [*q[0], 1 - q[0].sum(), 0], atol=1e-7)
    np.testing.assert_allclose(draft[-1, 2], [*p[3], 1 - p[3].sum(), 0], atol=1e-7)


@pytest.mark.slow
def test_a_simulated_method_reaches_the_optimum_but_does_not_exceed_it():
    draft, target = frontier.tables_of(*(np.asarray(_everything(name))[0] for name in "pq"))
    config = _config(pathlib.Path(), methods=("otm_layer",), calls=20_000, stems=(0,))
    parts = frontier.parts_of(config, 0)
    tokens = frontier._simulated(config, parts, draft, target)
    for part, mean in zip(parts, tokens, strict=True):
        best = most_tokens(*map(frontier._from_table, (draft, target)), part.method.tree)
        # One path: block verification, the optimum. Standard errors are about 0.006.
        low = best - (0.03 if part.paths == 1 else 0.1)
        assert low < mean < best + 0.03, part


@pytest.mark.slow
def test_equal_models_accept_all_drafts_on_all_trees(toy, tmp_path, monkeypatch):
    """Every call emits L + 1 tokens: no EOS is drawn in two calls of these seeds. The run is
    stopped once, and resumes."""
    calls: list = []
    monkeypatch.setattr(Bench, "run", stopping(Bench.run, calls, 2))
    same = {"draft": str(toy.folder / "target.safetensors"), "paths": (2,), "contexts": 1}
    config = _config(toy.folder, max_new_tokens=3, **same)
    with pytest.raises(KeyboardInterrupt):
        frontier.run(config, tmp_path)
    result = frontier.run(config, tmp_path)
    assert len(calls) == 3  # One for each stem, and the one that was stopped.
    assert [(row["stem"], row["paths"], row["nodes"]) for row in result["rows"]] == [
        (0, 2, 4),
        (1, 2, 3),
    ]
    for row in result["rows"]:
        tokens = row["tokens_per_call_by_seed"]
        # `gbv` drafts no trees with a stem.
        assert set(tokens) == ({"spectr"} if row["stem"] else {"spectr", "gbv"})
        assert tokens["spectr"] == [3.0]
    for row in result["optimum"]:
        assert row["tokens_per_call"]["optimum"] == pytest.approx([3], abs=1e-6)
        assert row["tokens_per_call"]["spectr"] == [3]
    lines = (tmp_path / "frontier.md").read_text().splitlines()
    assert sum(line.startswith("| 0.6 ") for line in lines) == 2 + 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"stems": (2,)}, "stems=2"),
        ({"methods": ("gsd",)}, "'gsd'"),
        ({"methods": ("gbv", "spectr")}, "'gbv'"),
        ({"policies": ((0.0, 1.0),)}, "policies="),
        ({"draft_temperature": 0.0}, "policies="),
        ({"policies": ((1.0,),)}, "temperature and top-p"),
        ({"contexts": 6}, "num_prompts=5"),
    ],
)
def test_invalid_configs_are_refused(toy, changes, message):
    with pytest.raises(UserError, match=message):
        frontier.check_frontier_config(_config(toy.folder, **changes))
