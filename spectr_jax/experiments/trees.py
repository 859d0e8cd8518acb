"""All methods at equal numbers of drafted tokens, and ERSD's Figures 3 and 4.

First the acceptance of the pair is measured: by child index for drafts without replacement (GSD and
ERSD, on batch trees), and for i.i.d. drafts by how many of k carry the accepted token. The trees
and their expected tokens per call follow from it.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import tqdm

from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding import tree as tree_lib
from spectr_jax.decoding.tree import Tree, optimal_order, optimal_tree, tree_of
from spectr_jax.decoding.verifiers import TokenByToken
from spectr_jax.experiments.config import trees_config
from spectr_jax.experiments.figures import drawing, ersd
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.acceptance import (
    Nodes,
    PairAcceptance,
    observe_drafts,
    observe_nodes,
)
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Contender, Measurement
from spectr_jax.experiments.planning import tree_search
from spectr_jax.experiments.planning.on_tree import cannot_branch, on_tree
from spectr_jax.experiments.planning.tree_search import CARRIERS, CHILDREN, statistic
from spectr_jax.loading.by_name import shape_name
from spectr_jax.transport import rules
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "trees"
ROWS_AT_ONCE = 16
"""Number of rows whose programs are compiled in parallel and kept."""


class Row(NamedTuple):
    """One row of the table, before it is measured."""

    size: int  # N of the comparison. The tree may be a little smaller.
    shape: str
    method: Method
    theory: float | None  # Predicted tokens per call (`_theory`).


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Any]:
    """Measures acceptance and every row; writes the table, the figures and the best trees to
    `workdir`.

    Raises:
      Finished: unless `again`, if `workdir` holds this table already.
      UserError: the config, models, prompts or workdir are invalid, before any measurement.
    """
    check_trees_config(config)
    target, (draft,), prompts = measurement.open_table(config, workdir, NAME, (config.draft,))
    if not 0 <= config.exit_layer < target.model.layers:
        raise UserError(
            f"exit_layer={config.exit_layer}: must be below the target's {target.model.layers} "
            "layers; lower it, or give 0 for no self-speculation"
        )
    if max(config.sizes) > target.model.vocab_size:
        raise UserError(
            f"sizes={max(config.sizes)}: must not exceed the vocabulary of "
            f"{target.model.vocab_size} tokens; lower it"
        )
    journal = Journal(workdir, NAME, config, report.weights(target, draft), again, prompts.digest())
    bench = Bench(config, target, [draft], prompts, journal)
    acceptance = measure_acceptance(bench)
    measured = _measure_rows(bench, table_rows(config, acceptance))
    result = {
        "title": f"Methods at equal numbers of drafted tokens: {shape_name(draft)} drafts for "
        f"{target.name}",
        "rows": measured,
        "acceptance_by_child": acceptance.R,
        "acceptance_by_drafts": {
            name: (1 - table[:, 0]).tolist() for name, table in acceptance.carriers.items()
        },
        "kl_bits": acceptance.kl if np.isfinite(acceptance.kl) else None,
        "prompts": prompts.real,
        "answer": answer(measured),
    }
    if acceptance.R:
        ersd.write_figures(acceptance, target.model.vocab_size, workdir)
    for name, R in acceptance.R.items():
        size = min(config.sizes, key=lambda size: abs(size - 16))
        tree = optimal_tree(R, size)
        nodes = acceptance.nodes[name, "optimal"]
        mean = dict(zip(nodes.paths, nodes.accepted.mean(axis=0), strict=True))
        accepted = [1.0, *(mean[tree.path(node)] for node in range(1, size + 1))]
        title = f"{name.upper()}, optimal tree of {size}"
        drawing.png(tree, workdir / f"optimal_tree_{name}.png", accepted, title)
    return journal.finish(result, markdown)


def check_trees_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, trees_config())
    measurement.check_decoding(config)
    check_positive(config, "sizes", "draft_length")
    most = max(config.sizes)
    for spec in config.extra_trees:
        tree = tree_lib.parse(spec)
        tree_search.branching_of(tree)
        if tree.size > most:
            raise UserError(
                f"extra_trees={spec!r}: has {tree.size} nodes, but the largest of sizes is {most}; "
                "add its size, or leave it out"
            )
    if config.temperature == 0 and not config.draft_temperature:
        raise UserError(
            "temperature=0.0: greedy drafts have no acceptance to measure; "
            "give a positive temperature, or a draft_temperature such as 0.7"
        )
    for name in config.methods:
        chains = [on_tree(name, tree_lib.chain(size)) for size in config.sizes]
        if not get_method(name).needs_draft or not any(chains):
            raise UserError(
                f"methods={name!r}: has no draft model, or no tree of N={most}; leave it out"
            )


def measure_acceptance(bench: Bench) -> PairAcceptance:
    """Measures acceptance: of drafts without replacement on batch, chain, SpecInfer and optimal
    trees, over all seeds, and of i.i.d. drafts on a batch tree, over one batch of prompts."""
    config, size = bench.config, max(bench.config.sizes)
    methods = [get_method(name) for name in config.methods]
    distinct = [method.name for method in methods if statistic(method) == CHILDREN]
    iid = tuple(method for method in methods if statistic(method) == CARRIERS)
    nodes: dict[tuple[str, str], Nodes] = {}
    divergences: list[float] = []

    def measure_nodes(orders: dict[tuple[str, str], Sequence[tuple[int, ...]]]) -> None:
        """Adds the acceptance of trees that grow in these orders, by (method, shape)."""
        contenders = {}
        for (name, shape), paths in orders.items():
            # Any tree will do, because the plan's acceptance is measured.
            method = dataclasses.replace(get_method(name), tree=tree_of(paths))
            contender = Contender(method, bench.drafts[0], observe_nodes)
            contenders[f"acceptance of {name}, {shape}"] = contender
        measured = bench.measure_all(contenders, config.seeds)
        for (key, paths), (label, runs) in zip(orders.items(), measured.items(), strict=True):
            tree = contenders[label].method.tree
            numbers = {tree.path(node): node for node in range(1, size + 1)}
            counts = np.array([run.observed["nodes"] for run in runs])
            nodes[key] = Nodes(paths, counts[:, [numbers[path] for path in paths]] / counts[:, :1])
            divergences.extend(run.observed["kl"] / run.observed["nodes"][0] for run in runs)

    measure_nodes(
        {
            (name, shape): [tree.path(node) for node in range(1, size + 1)]
            for name in distinct
            for shape, tree in _fixed_shapes(size).items()
        }
    )
    R = {
        name: tree_search.descending(nodes[name, "batch"].accepted.mean(axis=0).tolist())
        for name in distinct
    }
    measure_nodes({(name, "optimal"): optimal_order(R[name], size) for name in distinct})
    carriers = {}
    if iid:
        walked = dataclasses.replace(iid[0], tree=tree_lib.batch(size))  # Any of them will do.
        contender = Contender(walked, bench.drafts[0], observe_drafts(iid))
        # One batch of prompts, because SpecTr++ takes half a minute per call for all k together.
        counts = bench.measured("carriers", contender, config.seeds[0], batches=1).observed
        carriers = {
            name: table / table.sum(axis=1, keepdims=True) for name, table in counts.items()
        }
    kl = float(np.mean(divergences)) if divergences else np.nan
    return PairAcceptance(R, nodes, carriers, kl)


def table_rows(config: ml_collections.ConfigDict, acceptance: PairAcceptance) -> list[Row]:
    """Returns the baseline, and for each size every method on its trees of that size."""
    rows = [Row(0, "-", get_method("baseline"), 1.0)]
    sizes = sorted(config.sizes)
    for below, size in zip([0, *sizes], sizes, strict=False):
        if not below and config.exit_layer:
            own_layers = get_method("self_speculative", layers=config.exit_layer, draft_length=size)
            rows.append(Row(size, "chain", own_layers, None))
        for name in config.methods:
            for shape, tree in _shapes(config, acceptance, name, below, size).items():
                method = on_tree(name, tree)
                if method is not None:
                    rows.append(Row(size, shape, method, _theory(acceptance, method)))
    return rows


def _theory(acceptance: PairAcceptance, method: Method) -> float | None:
    """Returns the predicted tokens per call of a method that verifies token by token, or None if
    its statistic was not measured."""
    if not isinstance(method.verifier, TokenByToken):
        return None
    if statistic(method) == CARRIERS:
        branching = tree_search.branching_of(method.tree)
        return tree_search.expected_tokens_iid(branching, acceptance.carriers[method.name])
    if statistic(method) == CHILDREN:
        return tree_search.expected_tokens(method.tree, acceptance.R[method.name])
    return None


def _shapes(
    config: ml_collections.ConfigDict, acceptance: PairAcceptance, name: str, below: int, size: int
) -> dict[str, Tree]:
    """Returns the trees of one size on which a method is measured, by description.

    For i.i.d. drafts these are chains, the extra trees larger than `below`, and the best prefix
    tree for the acceptance of the method's plan, or of another plan if that is unknown. For
    distinct drafts they are fixed shapes and the optimal tree for R, of the method or of another.
    """
    if cannot_branch(name):
        return {"chain": tree_lib.chain(size)}
    rule, carriers = get_method(name).verifier.rule, acceptance.carriers
    if carriers and rule == rules.IID:
        length, table = config.draft_length, carriers.get(name, next(iter(carriers.values())))
        extra = [tree_lib.parse(spec) for spec in config.extra_trees]
        shapes = [tree_search.branching_of(tree) for tree in extra if below < tree.size <= size]
        if size >= 2 * length:
            shapes.insert(0, (size // length, *[1] * (length - 1)))
        best = tree_search.best_prefix_tree(table, size, length)
        notes = {best: ", best"} if name in carriers else {}
        return {
            f"({tree_lib.spelled(shape)}){notes.get(shape, '')}": tree_lib.prefix_tree(*shape)
            for shape in dict.fromkeys([*shapes, best])
        }
    trees = _fixed_shapes(size)
    if rule != rules.RACE or name not in acceptance.R:
        del trees["chain"]  # One draft per node is speculative decoding.
    if name in acceptance.R:
        trees["optimal"] = optimal_tree(acceptance.R[name], size)
    elif acceptance.R:
        other, R = next(iter(acceptance.R.items()))
        trees[f"{other}'s optimal"] = optimal_tree(R, size)
    return trees


def _fixed_shapes(size: int) -> dict[str, Tree]:
    return {
        "batch": tree_lib.batch(size),
        "chain": tree_lib.chain(size),
        "SpecInfer": tree_lib.specinfer(size),
    }


def _measure_rows(bench: Bench, rows: list[Row]) -> list[dict[str, Any]]:
    seeds, journal, results = bench.config.seeds, bench.journal, []
    named = [
        (f"N={row.size} {row.method.name} {row.shape}", row, Contender(row.method, bench.drafts[0]))
        for row in rows
    ]
    baseline = named[0][-1]

    def measured_row(row: Row, contender: Contender) -> dict[str, Any]:
        bench.run(baseline, 0, batches=1)  # The first runs are not timed.
        bench.run(contender, 0, batches=1)
        # The baseline runs just before and after the method, so that their ratio is fair.
        before = bench.run(baseline, 0, batches=2)
        runs = [bench.run(contender, seed) for seed in seeds]
        return _summary(row, runs, [before, bench.run(baseline, 0, batches=2)])

    with tqdm.tqdm(total=len(rows), unit="row", dynamic_ncols=True) as bar:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = named[first : first + ROWS_AT_ONCE]
            missing = {name: contender for name, _, contender in some if name not in journal}
            bench.compile({"baseline": baseline, **missing} if missing else {})
            for name, row, contender in some:
                bar.set_description(name)
                measure = functools.partial(measured_row, row, contender)
                results.append(journal.get_or_measure(name, measure))
                bar.update()
            jax.clear_caches()  # The number of programs a process can hold is limited.
    return results


def _summary(row: Row, runs: list[Measurement], baseline: list[Measurement]) -> dict[str, Any]:
    speed, baseline_speed = (
        float(np.median([run.per_second for run in some])) for some in (runs, baseline)
    )
    tree = row.method.tree
    return {
        "size": row.size,
        "method": row.method.name,
        "shape": row.shape,
        "nodes": tree.size,
        "levels": tree.height,
        "parents": list(tree.parents),
        **measurement.tokens_per_call(runs),
        "theory": row.theory,
        "tokens_per_second": speed,
        "speedup": speed / baseline_speed,
    }


def answer(rows: list[dict[str, Any]]) -> str:
    """Returns a sentence that names the best method."""
    drafting = [row for row in rows if row["size"]]
    best = []
    for size in sorted({row["size"] for row in drafting}):
        of_size = [row for row in drafting if row["size"] == size]
        row = max(of_size, key=lambda row: row["tokens_per_call"])
        best += [f"N = {size}: `{row['method']}` on {row['shape']} ({row['tokens_per_call']:.2f})"]
    fastest = max(drafting, key=lambda row: row["speedup"])
    return (
        f"Most tokens per call: {'; '.join(best)}. Most tokens per second of the methods on this "
        f"machine: `{fastest['method']}`, {fastest['shape']}, {fastest['nodes']} of "
        f"{fastest['size']} nodes, {fastest['speedup']:.2f} x the baseline"
        f"{': use the baseline here' if fastest['speedup'] < 1 else ''}."
    )


def markdown(result: dict[str, Any]) -> str:
    """Returns the table with the answer and its provenance, as Markdown."""
    columns: report.Columns = {
        "N": lambda row: row["size"] or "-",
        "Method": lambda row: row["method"],
        "Tree": lambda row: row["shape"],
        "Nodes": lambda row: row["nodes"],
        "Levels": lambda row: row["levels"],
        "Tokens/call": lambda row: report.mean_and_std(row["tokens_per_call_by_seed"]),
        "Tokens/call, predicted": lambda row: report.number(row["theory"], ".2f"),
        "Tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
        "Speedup": lambda row: f"{row['speedup']:.2f}",
    }
    config = result["config"]
    notes = [
        f"{report.decoded(result)} The speedup is relative to baseline runs just before and after.",
        "The prediction assumes that acceptance is the same at all nodes. For drafts without "
        "replacement it uses the acceptance by child index, and for i.i.d. drafts the acceptance "
        "by the number of drafts that carry the accepted token.",
    ]
    for name, R in result["acceptance_by_child"].items():
        values = ", ".join(f"{value:.3f}" for value in R[:6])
        notes.append(f"Acceptance by child index, `{name}`: {values}, ...")
    for name, alpha in result["acceptance_by_drafts"].items():
        numbers = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < len(alpha)]
        values = ", ".join(f"{alpha[k]:.3f} ({k})" for k in numbers)
        notes.append(
            f"Acceptance by number of i.i.d. drafts, `{name}`, first batch of prompts: {values}."
        )
    if result["kl_bits"] is not None:
        notes.append(f"KL(target, draft) = {result['kl_bits']:.2f} bits.")
    notes += [
        f"Target `{config['target']}`, draft `{config['draft']}`, prompts `{config['prompts']}`. "
        f"`self_speculative` drafts with the first {config['exit_layer']} layers of the target.",
        report.provenance_line(result),
    ]
    table = f"{result['answer']}\n\n{report.table(columns, result['rows'])}"
    return report.page(result["title"], table, notes)
