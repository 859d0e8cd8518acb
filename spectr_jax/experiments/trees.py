"""All methods at equal numbers of drafted tokens, and ERSD's Figures 3 and 4.

First the acceptance of the pair is measured: by child index for drafts without replacement (GSD and
ERSD, batch runs), and for i.i.d. drafts by the number of k that carry the accepted token. The trees
and their expected tokens per call follow from it.
"""

import dataclasses
import functools
import itertools
import pathlib
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import tqdm

from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding import tree as tree_lib
from spectr_jax.decoding.methods import cannot_branch, on_tree
from spectr_jax.decoding.tree import Tree
from spectr_jax.experiments.config import trees_config
from spectr_jax.experiments.figures import drawing, ersd
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.acceptance import (
    Nodes,
    PairAcceptance,
    observe_drafts,
    observe_nodes,
    shares,
)
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Measurement, Program
from spectr_jax.experiments.planning import prediction, tree_search
from spectr_jax.experiments.planning.prediction import CARRIERS, CHILDREN, WINNERS, statistic
from spectr_jax.loading.by_name import shape_name
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "trees"
ROWS_AT_ONCE = 16
"""Number of rows whose programs are compiled in parallel and kept."""


class Row(NamedTuple):
    """One row of the table, before it is measured.

    Attributes:
      size: the N of the comparison; the tree may be a little smaller.
      shape: description of the tree.
      method: the method with its tree.
      theory: expected tokens per call under 0-th order acceptance; None if not covered.
    """

    size: int
    shape: str
    method: Method
    theory: float | None


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures acceptance and every row; writes the table, the figures and the best trees to
    `workdir`.

    A journal there keeps the measurements, so that after a stop the same command resumes.

    Raises:
      UserError: the config, models, prompts or workdir are invalid, before any measurement.
    """
    check_trees_config(config)
    target, (draft,), prompts = measurement.open_table(config, workdir, NAME, (config.draft,))
    if config.exit_layer >= target.model.layers:
        raise UserError(
            f"exit_layer={config.exit_layer} of a target of {target.model.layers} layers; give "
            "fewer, or 0"
        )
    if max(config.sizes) > target.model.vocab_size:
        raise UserError(
            f"N={max(config.sizes)} children a node exceed the vocabulary of "
            f"{target.model.vocab_size} tokens; lower sizes"
        )

    journal = Journal(workdir, NAME, config, report.weights(target, draft))
    bench = Bench(config, target, [draft], prompts, journal)
    acceptance = measure_acceptance(bench)
    rows = table_rows(config, acceptance)
    result = {
        "title": f"Methods at equal numbers of drafted tokens: {shape_name(draft)} drafts for {target.name}",
        "rows": _measure_rows(bench, rows),
        "acceptance_by_child": acceptance.R,
        "acceptance_by_drafts": {
            name: (1 - table[:, 0]).tolist() for name, table in acceptance.carriers.items()
        },
        "kl_bits": acceptance.kl if np.isfinite(acceptance.kl) else None,
        "prompts": prompts.real,
        **journal.about(),
    }
    result["answer"] = answer(result["rows"])
    workdir.mkdir(parents=True, exist_ok=True)
    if acceptance.R:
        ersd.write_figures(acceptance, target.model.vocab_size, workdir)
    for name, R in acceptance.R.items():
        size = min(config.sizes, key=lambda size: abs(size - 16))
        tree = tree_search.optimal_tree(R, size)
        mean = {(): 1.0} | acceptance.nodes[name, "optimal"].mean()
        accepted = [mean[tree.path(node)] for node in range(size + 1)]
        title = f"{name.upper()}, optimal tree of {size}"
        drawing.png(tree, workdir / f"optimal_tree_{name}.png", accepted=accepted, title=title)
    report.write(workdir, NAME, result, markdown(result))
    journal.remove()
    return result


def check_trees_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, trees_config())
    measurement.check_decoding(config)
    check_positive(config, "sizes", "draft_length")
    for spec in config.extra_trees:
        tree = tree_lib.parse(spec)
        tree_search.branching_of(tree)
        if tree.size > max(config.sizes):
            raise UserError(
                f"extra tree {spec!r} has {tree.size} nodes, more than the largest of "
                f"sizes={config.sizes}; add its size"
            )
    measurement.check_has_acceptance(config)
    for name in config.methods:
        if not get_method(name).needs_draft or all(
            on_tree(name, tree_lib.chain(size)) is None for size in config.sizes
        ):
            raise UserError(
                f"methods has {name!r}, which has no draft model, or no tree of "
                f"N={max(config.sizes)}; leave it out"
            )
    if config.exit_layer < 0:
        raise UserError(
            f"exit_layer={config.exit_layer} is negative; give a number of layers, or 0 for none"
        )


def measure_acceptance(bench: Bench) -> PairAcceptance:
    """Measures acceptance: drafts without replacement on batch, chain, SpecInfer and optimal
    trees, and i.i.d. batches, each with an observer."""
    config, journal, size = bench.config, bench.journal, max(bench.config.sizes)
    methods = [get_method(name) for name in config.methods]
    distinct = [method.name for method in methods if statistic(method) == CHILDREN]
    iid = tuple(method for method in methods if statistic(method) in (CARRIERS, WINNERS))
    nodes: dict[tuple[str, str], Nodes] = {}
    divergences: list[float] = []

    def entry(name: str, shape: str, seed: int) -> str:
        return f"acceptance of {name}, {shape}, {seed}"

    def run_nodes(shapes: dict[tuple[str, str], Any]) -> None:
        programs = {
            # Any tree will do, because the plan's acceptance is measured.
            key: Program(
                dataclasses.replace(get_method(key[0]), tree=tree_search.tree_of(paths)),
                bench.drafts[0],
                observe_nodes,
            )
            for key, paths in shapes.items()
        }
        missing = [
            key
            for key in programs
            if not all(entry(*key, seed) in journal for seed in config.seeds)
        ]
        bench.compile({", ".join(key): programs[key] for key in missing})
        for key, paths in shapes.items():
            tree, sums = programs[key].method.tree, []
            numbers = {tree.path(node): node for node in range(1, size + 1)}
            for seed in config.seeds:
                bar.set_description(entry(*key, seed))
                sums.append(bench.measured(entry(*key, seed), programs[key], seed).observed)
            counts = np.array([each["nodes"] for each in sums])
            nodes[key] = Nodes(paths, counts[:, [numbers[path] for path in paths]] / counts[:, :1])
            divergences.extend(each["kl"] / each["nodes"][0] for each in sums)
            bar.update()

    with tqdm.tqdm(total=4 * len(distinct) + len(iid[:1]), unit="run", dynamic_ncols=True) as bar:
        fixed = _fixed_shapes(size).items()
        run_nodes(
            {
                (name, shape): [tree.path(node) for node in range(1, size + 1)]
                for name in distinct
                for shape, tree in fixed
            }
        )
        R = {
            name: tree_search.descending(nodes[name, "batch"].accepted.mean(axis=0).tolist())
            for name in distinct
        }
        run_nodes(
            {(name, "optimal"): tree_search.optimal_order(R[name], size) for name in distinct}
        )
        counts = {}
        if iid:
            bar.set_description("i.i.d. drafts")
            walked = dataclasses.replace(iid[0], tree=tree_lib.batch(size))  # Any of them will do.
            program = Program(walked, bench.drafts[0], observe_drafts(iid, CARRIERS))
            # One batch of prompts, because SpecTr++ takes half a minute per call for all k
            # together.
            counts = bench.measured("carriers", program, config.seeds[0], batches=1).observed
            bar.update()
    kl = float(np.mean(divergences)) if divergences else np.nan
    return PairAcceptance(R, nodes, {name: shares(table) for name, table in counts.items()}, kl)


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
    """Returns expected tokens per call under 0-th order acceptance, if that was measured."""
    if statistic(method) == CARRIERS:
        return prediction.predictor(method, acceptance.carriers[method.name])(method.tree)
    if statistic(method) == CHILDREN:
        return prediction.predictor(method, np.array(acceptance.R[method.name]))(method.tree)
    return None


def _shapes(
    config: ml_collections.ConfigDict, acceptance: PairAcceptance, name: str, below: int, size: int
) -> dict[str, Tree]:
    """Returns the trees of one size on which a method is measured, by description.

    For i.i.d. drafts these are chains, the extra trees larger than `below`, and the best prefix
    tree for the acceptance of the plan, or of another plan if that is unknown. For distinct drafts
    they are fixed shapes and the optimal tree for R, of the method or of another one.
    """
    if cannot_branch(name):
        return {"chain": tree_lib.chain(size)}
    carriers = acceptance.carriers
    if carriers and get_method(name).verifier.rule == "iid":
        length, table = config.draft_length, carriers.get(name, next(iter(carriers.values())))
        given = [tree_search.branching_of(tree_lib.parse(spec)) for spec in config.extra_trees]
        given = [
            branching
            for branching in given
            if below < tree_lib.prefix_tree(*branching).size <= size
        ]
        if size >= 2 * length:
            given.insert(0, (size // length, *[1] * (length - 1)))
        best = tree_search.best_prefix_trees(table, size, length)[0].branching
        note = ", best" if name in carriers else ""
        branchings = dict.fromkeys([*given, best])
        named = {
            each: f"({tree_lib.spelled(each)}){note if each == best else ''}" for each in branchings
        }
        return {name: tree_lib.prefix_tree(*each) for each, name in named.items()}
    if name in acceptance.R:
        shapes = _fixed_shapes(size) | {
            "optimal": tree_search.optimal_tree(acceptance.R[name], size)
        }
        if get_method(name).verifier.rule != "race":
            del shapes["chain"]  # One draft per node is speculative decoding.
        return shapes
    shapes = {"batch": tree_lib.batch(size), "SpecInfer": tree_lib.specinfer(size)}
    for other, R in itertools.islice(acceptance.R.items(), 1):
        shapes[f"{other}'s optimal"] = tree_search.optimal_tree(R, size)
    return shapes


def _fixed_shapes(size: int) -> dict[str, Tree]:
    return {
        "batch": tree_lib.batch(size),
        "chain": tree_lib.chain(size),
        "SpecInfer": tree_lib.specinfer(size),
    }


def _measure_rows(bench: Bench, rows: list[Row]) -> list[dict[str, Any]]:
    seeds, journal, results = bench.config.seeds, bench.journal, []
    programs = [Program(row.method, bench.drafts[0]) for row in rows]
    baseline = programs[0]

    def name(row: Row) -> str:
        return f"N={row.size} {row.method.name} {row.shape}"

    def measured_row(row: Row, program: Program) -> dict[str, Any]:
        for each in (baseline, program):
            bench.run(each, 0, batches=1)  # The first run is not timed.
        # The baseline runs close in time, for the ratio.
        before = bench.run(baseline, 0, batches=2)
        runs = [bench.run(program, seed) for seed in seeds]
        return _summary(row, runs, [before, bench.run(baseline, 0, batches=2)])

    with tqdm.tqdm(total=len(rows), unit="row", dynamic_ncols=True) as bar:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = list(zip(rows, programs, strict=True))[first : first + ROWS_AT_ONCE]
            missing = {name(row): program for row, program in some if name(row) not in journal}
            bench.compile({"baseline": baseline, **missing} if missing else {})
            for row, program in some:
                bar.set_description(name(row))
                results.append(
                    journal.value(name(row), functools.partial(measured_row, row, program))
                )
                bar.update()
            jax.clear_caches()  # The number of programs a process can hold is limited.
    return results


def _summary(row: Row, runs: list[Measurement], baseline: list[Measurement]) -> dict[str, Any]:
    per_call = [each.tokens / each.calls for each in runs]
    speed, baseline_speed = (
        float(np.median([each.tokens / each.seconds for each in some])) for some in (runs, baseline)
    )
    tree = row.method.tree
    return {
        "size": row.size,
        "method": row.method.name,
        "shape": row.shape,
        "nodes": tree.size,
        "levels": tree.height,
        "parents": list(tree.parents),
        "tokens_per_call": float(np.mean(per_call)),
        "tokens_per_call_std": float(np.std(per_call, ddof=1)) if len(per_call) > 1 else 0.0,
        "tokens_per_call_by_seed": per_call,
        "theory": row.theory,
        "tokens_per_second": speed,
        "speedup": speed / baseline_speed,
    }


def answer(rows: list[dict[str, Any]]) -> str:
    """Returns a sentence that names the best method."""
    drafting = [row for row in rows if row["size"]]
    best = {
        size: max(
            (row for row in drafting if row["size"] == size), key=lambda row: row["tokens_per_call"]
        )
        for size in sorted({row["size"] for row in drafting})
    }
    fastest = max(drafting, key=lambda row: row["speedup"])
    most = "; ".join(
        f"N = {size}: `{row['method']}` on {row['shape']} ({row['tokens_per_call']:.2f})"
        for size, row in best.items()
    )
    return (
        f"Most tokens per call: {most}. Most tokens per second of the methods on this machine: "
        f"`{fastest['method']}`, "
        f"{fastest['shape']}, {fastest['nodes']} of {fastest['size']} nodes, "
        f"{fastest['speedup']:.2f} x the baseline"
        f"{': use the baseline here' if fastest['speedup'] < 1 else ''}."
    )


def markdown(result: dict[str, Any]) -> str:
    """Returns the table with the answer and its provenance, as Markdown."""
    header = ["N", "Method", "Tree", "Nodes", "Levels", "Tokens/call", "Theory", "Tokens/s"]
    rows = [
        [
            *(str(row["size"] or "-"), row["method"], row["shape"]),
            *(str(row["nodes"]), str(row["levels"])),
            report.mean_and_std(row["tokens_per_call_by_seed"]),
            "-" if row["theory"] is None else f"{row['theory']:.2f}",
            *(f"{row['tokens_per_second']:,.0f}", f"{row['speedup']:.2f}"),
        ]
        for row in result["rows"]
    ]
    config, kl_bits = result["config"], result["kl_bits"]
    notes = [
        f"**Which should I use?** {result['answer']}",
        f"{report.decoded(result)} The speedup is over baseline runs just before and after.",
        "Theory is the expected number of tokens per call if acceptance were the same at all nodes "
        "as at the root, by child index for drafts without replacement, and by the number of drafts "
        "that carry the accepted token for i.i.d. drafts.",
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
    notes += [f"KL(target, draft) = {kl_bits:.2f} bits."] if kl_bits is not None else []
    notes += [
        f"Target `{config['target']}`, draft `{config['draft']}`, prompts `{config['prompts']}`. "
        f"`self_speculative` drafts with the first {config['exit_layer']} layers of the target.",
        report.made_by(result),
    ]
    table = report.markdown_table([*header, "Speedup"], rows)
    return report.page(result["title"], table, notes)
