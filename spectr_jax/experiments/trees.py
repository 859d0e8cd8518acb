"""Which method should I use? All of them at equal numbers of drafted tokens, and ERSD's Figures 3 and 4.

First the acceptance of the pair is measured: by child index for drafts without replacement (GSD and ERSD, batch runs),
and for i.i.d. drafts how many of k carry the accepted token. From these follow the trees, and what theory expects of them.
"""

import functools
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import tqdm

from spectr_jax.config import check_fields, check_positive, trees_config
from spectr_jax.decoding import Method, get_method, tree_search
from spectr_jax.decoding import tree as tree_lib
from spectr_jax.decoding.tree import Tree
from spectr_jax.errors import UserError
from spectr_jax.figures import drawing, ersd
from spectr_jax.loading import Trained, shape_name
from spectr_jax.measure import measurement, report
from spectr_jax.measure.acceptance import Nodes, PairAcceptance, observe_carriers, observe_nodes, shares
from spectr_jax.measure.call_times import call_seconds
from spectr_jax.measure.journal import Journal
from spectr_jax.measure.measurement import Measurement, Program

NAME = "trees"
RACES = ("gsd", "ersd")
IID = ("naive", "recursive", "kseq_gamma", "spectr", "spectr+", "spectr++", "otm", "gbv", "otm_block")
SEARCHED = {"spectr": "kseq", "otm": "otm"}
"""The plans whose best prefix trees are searched, and whose theory is known, by method."""
ROWS_AT_ONCE = 16
"""Whose programs are compiled side by side, and held."""


class Row(NamedTuple):
    """One row of the table, before it is measured.

    Attributes:
      size: the N that it is compared at; its tree may be a little smaller.
      shape: of the tree, in words.
      method: with the tree.
      theory: expected tokens a call under 0-th order acceptance; None where there is no theory.
    """

    size: int
    shape: str
    method: Method
    theory: float | None


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures acceptance and every row, and writes the table, the figures and the best trees to `workdir`.

    What it has measured is in a journal there until it is done: the same command goes on after a stop.

    Raises:
      UserError: anything wrong with the config, the models, the prompts or the workdir, before any measurement.
    """
    check_trees_config(config)
    target, (draft,), prompts = measurement.open_run(config, workdir, NAME, (config.draft,))
    if config.exit_layer >= target.model.layers:
        raise UserError(f"exit_layer={config.exit_layer} of a target of {target.model.layers} layers; give fewer, or 0")
    if max(config.sizes) > target.model.vocab_size:
        raise UserError(
            f"N={max(config.sizes)} children a node exceed the vocabulary of {target.model.vocab_size} tokens; lower sizes"
        )

    journal = Journal(workdir, NAME, config)
    started = time.monotonic() - journal.seconds

    def own_draft(method: Method) -> Trained | None:
        return None if method.exit_layer else draft

    def measured(method: Method, *args, **kwargs) -> Measurement:
        return measurement.measure(method, target, own_draft(method), prompts, config, *args, **kwargs)

    def compile_ahead(programs: list[tuple[Method, Callable | None]]) -> None:
        known = [Program(method, own_draft(method), observe) for method, observe in programs]
        measurement.compile_ahead(known, target, prompts, config)

    acceptance = measure_acceptance(config, compile_ahead, measured, journal)
    fastest = journal.value("fastest trees", lambda: fastest_trees(config, acceptance, target, draft))
    rows = table_rows(config, acceptance, {name: Tree(tuple(each["parents"])) for name, each in fastest.items()})
    result = {
        "title": f"Methods at equal numbers of drafted tokens: {shape_name(draft.model.config)} drafts for {target.name}",
        "rows": _measure_rows(config, rows, compile_ahead, measured, journal),
        "acceptance_by_child": acceptance.R,
        "acceptance_by_drafts": {name: (1 - table[:, 0]).tolist() for name, table in acceptance.carriers.items()},
        "kl_bits": acceptance.kl,
        "fastest_trees": fastest,
        "prompts": prompts.real,
        **report.about(config, started),
    }
    result["answer"] = answer(result["rows"])
    workdir.mkdir(parents=True, exist_ok=True)
    ersd.write_figures(acceptance, target.model.vocab_size, workdir)
    for name in RACES:
        size = min(config.sizes, key=lambda size: abs(size - 16))
        tree = tree_search.optimal_tree(acceptance.R[name], size)
        mean = {(): 1.0} | acceptance.nodes[name, "optimal"].mean()
        accepted = [mean[tree.path(node)] for node in range(size + 1)]
        title = f"{name.upper()}, optimal tree of {size}"
        drawing.png(tree, workdir / f"optimal_tree_{name}.png", accepted=accepted, title=title)
    report.write(workdir, NAME, result, markdown(result))
    journal.remove()
    return result


def check_trees_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for a config that cannot be evaluated."""
    check_fields(config, trees_config())
    measurement.check_decoding(config)
    check_positive(config, "sizes", "draft_length")
    for spec in config.extra_trees:
        tree = tree_lib.parse(spec)
        tree_search.branching_of(tree)
        if tree.size > max(config.sizes):
            raise UserError(f"extra tree {spec!r} has {tree.size} nodes, more than the largest of sizes={config.sizes}")
    if config.temperature == 0:
        raise UserError("temperature=0.0 has no acceptance to measure; give a positive one, such as 1.0")
    if config.exit_layer < 0:
        raise UserError(f"exit_layer={config.exit_layer} is negative; give a number of layers, or 0 for none")


def measure_acceptance(config: ml_collections.ConfigDict, compile_ahead, measured, journal: Journal) -> PairAcceptance:
    """Runs GSD and ERSD on batch, chain, SpecInfer and optimal trees, and i.i.d. batches, each with an observer."""
    size = max(config.sizes)
    nodes: dict[tuple[str, str], Nodes] = {}
    divergences: list[float] = []

    def entry(name: str, shape: str, seed: int) -> str:
        return f"acceptance of {name}, {shape}, {seed}"

    def run_nodes(shapes: dict[tuple[str, str], Any]) -> None:
        methods = {key: get_method(key[0], tree=tree_search.tree_of(paths)) for key, paths in shapes.items()}
        missing = [key for key in methods if not all(entry(*key, seed) in journal for seed in config.seeds)]
        compile_ahead([(methods[key], observe_nodes) for key in missing])
        for key, paths in shapes.items():
            tree, sums = methods[key].tree, []
            numbers = {tree.path(node): node for node in range(1, size + 1)}
            for seed in config.seeds:
                bar.set_description(entry(*key, seed))
                take = functools.partial(measured, methods[key], seed, observe=observe_nodes)
                sums.append(journal.measurement(entry(*key, seed), take).observed)
            counts = np.array([each["nodes"] for each in sums])
            nodes[key] = Nodes(paths, counts[:, [numbers[path] for path in paths]] / counts[:, :1])
            divergences.extend(each["kl"] / each["nodes"][0] for each in sums)
            bar.update()

    with tqdm.tqdm(total=4 * len(RACES) + 1, unit="run", dynamic_ncols=True) as bar:
        fixed = _fixed_shapes(size).items()
        run_nodes(
            {(name, shape): [tree.path(node) for node in range(1, size + 1)] for name in RACES for shape, tree in fixed}
        )
        R = {name: tree_search.descending(nodes[name, "batch"].accepted.mean(axis=0).tolist()) for name in RACES}
        run_nodes({(name, "optimal"): tree_search.optimal_order(R[name], size) for name in RACES})
        bar.set_description("i.i.d. drafts")
        method = get_method("spectr", tree=tree_lib.batch(size))
        take = functools.partial(measured, method, config.seeds[0], observe=observe_carriers)
        counts = journal.measurement("carriers", take).observed
        bar.update()
    carriers = {plan: shares(table) for plan, table in counts.items()}
    return PairAcceptance(R, nodes, carriers, float(np.mean(divergences)))


def fastest_trees(
    config: ml_collections.ConfigDict, acceptance: PairAcceptance, target: Trained, draft: Trained
) -> dict[str, dict[str, Any]]:
    """For GSD and ERSD, the parents of the tree of most tokens a second by measured R and call times, and that speed over
    the batch."""
    size, batch = max(config.sizes), config.batch_size
    counts = [2**power for power in range(size.bit_length() + 1)]
    draft_seconds, target_seconds = (call_seconds(each.model, batch, counts) for each in (draft, target))
    found = {}
    for name, R in acceptance.R.items():
        tree, speed = tree_search.fastest_tree(R, draft_seconds, target_seconds, size, config.draft_length)
        found[name] = {"parents": list(tree.parents), "predicted_tokens_per_second": speed * batch}
    return found


def table_rows(config: ml_collections.ConfigDict, acceptance: PairAcceptance, fastest: dict[str, Tree]) -> list[Row]:
    """The baseline; then for each size every method on its trees of that size; the fastest trees where they fit."""
    rows = [Row(0, "-", get_method("baseline"), 1.0)]
    sizes = sorted(config.sizes)
    for below, size in zip([0, *sizes], sizes, strict=False):
        alpha = 1 - acceptance.carriers["otm"][1, 0]
        theory = tree_search.expected_tokens(tree_lib.chain(size), [alpha])
        rows.append(Row(size, "chain", get_method("speculative", draft_length=size), theory))
        rows.append(Row(size, "chain", get_method("block", draft_length=size), None))
        if not below and config.exit_layer:
            method = get_method("self_speculative", layers=config.exit_layer, draft_length=size)
            rows.append(Row(size, "chain", method, None))
        rows += _iid_rows(config, acceptance, below, size)
        for name in RACES:
            shapes = _fixed_shapes(size) | {"optimal": tree_search.optimal_tree(acceptance.R[name], size)}
            if below < fastest[name].size <= size:
                shapes["fastest by call times"] = fastest[name]
            for shape, tree in shapes.items():
                if (name, shape) != ("gsd", "chain"):  # That is speculative decoding.
                    theory = tree_search.expected_tokens(tree, acceptance.R[name])
                    rows.append(Row(size, shape, get_method(name, tree=tree), theory))
        shapes = {"batch": tree_lib.batch(size), "SpecInfer": tree_lib.specinfer(size)}
        shapes["gsd's optimal"] = tree_search.optimal_tree(acceptance.R["gsd"], size)
        rows += [Row(size, shape, get_method("greedy_drafts", tree=tree), None) for shape, tree in shapes.items()]
    return rows


def _fixed_shapes(size: int) -> dict[str, Tree]:
    return {"batch": tree_lib.batch(size), "chain": tree_lib.chain(size), "SpecInfer": tree_lib.specinfer(size)}


def _iid_rows(config: ml_collections.ConfigDict, acceptance: PairAcceptance, below: int, size: int) -> list[Row]:
    """Chains, the extra trees that are larger than `below`, and the best tree that the search finds for each plan."""
    length = config.draft_length
    given = [tree_search.branching_of(tree_lib.parse(spec)) for spec in config.extra_trees]
    given = [branching for branching in given if below < tree_lib.prefix_tree(*branching).size <= size]
    if size >= 2 * length:
        given.insert(0, (size // length, *[1] * (length - 1)))
    best = {
        plan: tree_search.best_prefix_trees(table, size, length)[0].branching for plan, table in acceptance.carriers.items()
    }
    rows = []
    for branching in dict.fromkeys([*given, *best.values()]):
        for name in IID:
            plan = SEARCHED.get(name)
            if branching not in given and branching != best[plan or "otm"]:
                continue
            note = ", best" if plan and branching == best[plan] else ""
            theory = tree_search.expected_tokens_iid(branching, acceptance.carriers[plan]) if plan else None
            method = get_method(name, tree=tree_lib.prefix_tree(*branching))
            rows.append(Row(size, f"({_spelled(branching)}){note}", method, theory))
    return rows


def _spelled(branching: tuple[int, ...]) -> str:
    """`8, 1x7` for 8 and seven times 1."""
    runs = [(children, len(list(run))) for children, run in itertools.groupby(branching)]
    return ", ".join(str(children) if times == 1 else f"{children}x{times}" for children, times in runs)


def _measure_rows(
    config: ml_collections.ConfigDict, rows: list[Row], compile_ahead, measured, journal: Journal
) -> list[dict[str, Any]]:
    baseline, results = rows[0].method, []

    def name(row: Row) -> str:
        return f"N={row.size} {row.method.name} {row.shape}"

    def measured_row(row: Row) -> dict[str, Any]:
        for method in (baseline, row.method):
            measured(method, 0, batches=1)  # The first run is not timed.
        # The baseline close by in time, for the ratio.
        before = measured(baseline, 0, batches=2)
        runs = [measured(row.method, seed) for seed in config.seeds]
        return _summary(row, runs, [before, measured(baseline, 0, batches=2)])

    with tqdm.tqdm(total=len(rows), unit="row", dynamic_ncols=True) as bar:
        for first in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[first : first + ROWS_AT_ONCE]
            missing = [row.method for row in some if name(row) not in journal]
            compile_ahead([(method, None) for method in dict.fromkeys([baseline, *missing] if missing else [])])
            for row in some:
                bar.set_description(name(row))
                results.append(journal.value(name(row), functools.partial(measured_row, row)))
                bar.update()
            jax.clear_caches()  # A process may hold so many programs only.
    return results


def _summary(row: Row, runs: list[Measurement], baseline: list[Measurement]) -> dict[str, Any]:
    per_call = [each.tokens / each.calls for each in runs]
    speed, baseline_speed = (float(np.median([each.tokens / each.seconds for each in some])) for some in (runs, baseline))
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
    """Which method to use, in a sentence."""
    drafting = [row for row in rows if row["size"]]
    best = {
        size: max((row for row in drafting if row["size"] == size), key=lambda row: row["tokens_per_call"])
        for size in sorted({row["size"] for row in drafting})
    }
    fastest = max(drafting, key=lambda row: row["speedup"])
    most = "; ".join(
        f"N = {size}: `{row['method']}` on {row['shape']} ({row['tokens_per_call']:.2f})" for size, row in best.items()
    )
    return (
        f"Most tokens per call: {most}. Most tokens per second of the methods on this machine: `{fastest['method']}`, "
        f"{fastest['shape']}, {fastest['nodes']} of {fastest['size']} nodes, {fastest['speedup']:.2f} x the baseline"
        f"{': use the baseline here' if fastest['speedup'] < 1 else ''}."
    )


def _predicted(found: dict[str, Any]) -> str:
    speed = f"{found['predicted_tokens_per_second']:,.0f} tokens/s"
    return f"a tree of N = {len(found['parents'])}, {speed}" if found["parents"] else f"no drafts at all, {speed}"


def markdown(result: dict[str, Any]) -> str:
    """The table with the answer and its provenance, as Markdown."""
    header = ["N", "Method", "Tree", "Nodes", "Levels", "Tokens per call", "Theory", "Tokens/s", "x baseline"]
    rows = [
        [
            str(row["size"] or "-"),
            row["method"],
            row["shape"],
            str(row["nodes"]),
            str(row["levels"]),
            report.mean_and_std(row["tokens_per_call_by_seed"]),
            "-" if row["theory"] is None else f"{row['theory']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['speedup']:.2f}",
        ]
        for row in result["rows"]
    ]
    config = result["config"]
    children = {name: ", ".join(f"{value:.3f}" for value in R[:6]) for name, R in result["acceptance_by_child"].items()}
    alpha = {
        name: [f"{values[k]:.3f} ({k})" for k in (1, 2, 4, 8, 16, 32, 64) if k < len(values)]
        for name, values in result["acceptance_by_drafts"].items()
    }
    notes = [
        f"**Which should I use?** {result['answer']}",
        f"{result['prompts']} prompts of up to {config['prompt_tokens']} tokens, up to {config['max_new_tokens']} new ones "
        f"each, batch {config['batch_size']}, temperature {config['temperature']}; {report.over_seeds(config['seeds'])}; "
        "x baseline against baseline runs just before and after.",
        "Theory: expected tokens a call if acceptance were the same at all nodes (0-th order), as measured at the root: for "
        "`gsd` and `ersd` by child index, for i.i.d. drafts by the number of drafts that carry the accepted token.",
        *(f"Acceptance by child index, `{name}`: {values}, ..." for name, values in children.items()),
        *(f"Acceptance by number of i.i.d. drafts, plan `{name}`: {', '.join(values)}." for name, values in alpha.items()),
        *(
            f"Hardware-aware search, `{name}`: {_predicted(found)}, from measured call times without selection."
            for name, found in result["fastest_trees"].items()
        ),
        f"KL(target, draft) = {result['kl_bits']:.2f} bits. Target `{config['target']}`, draft `{config['draft']}`, prompts "
        f"`{config['prompts']}`. `self_speculative` drafts with the first {config['exit_layer']} of the target's layers.",
        report.made_by(result),
    ]
    return f"# {result['title']}\n\n{report.markdown_table(header, rows)}\n\n" + "\n\n".join(notes) + "\n"
