"""Finds the fastest method, K, L and tree for a pair of models on this machine.

The times of a target call, of drafting a level and of selecting a token, and the acceptance of the
pair are measured once. They predict the tokens per second of every candidate. The best candidates
are run and printed next to their predictions.
"""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from spectr_jax import transport
from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding import tree as tree_lib
from spectr_jax.decoding.tree import Tree, optimal_order, tree_of
from spectr_jax.decoding.verifiers import TokenByToken
from spectr_jax.experiments.call_parts import Times, call_time, counted, measure_times, on_chains
from spectr_jax.experiments.config import auto_config
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.acceptance import observe_drafts, observe_nodes, shares
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Contender
from spectr_jax.experiments.measure.replay import can_be_replayed, covering, observe_replays
from spectr_jax.experiments.planning import prediction, tree_search
from spectr_jax.experiments.planning.on_tree import cannot_branch, on_tree, options_for
from spectr_jax.experiments.planning.prediction import CARRIERS, CHILDREN, WINNERS, statistic
from spectr_jax.transport import rules
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "auto"
SEVERAL_HOSTS = False
FAR_APART = 1.75
"""Ratio of predicted and measured speeds from which the page warns. On an idle machine the median
ratio of our tables is between 0.8 and 1.5."""


class Statistics(NamedTuple):
    """What predicts tokens per call, measured for the pair of models."""

    tables: dict[str, np.ndarray]  # By method, the table that `prediction.predictor` takes.
    tokens: float  # Mean number of new tokens per sequence.
    # For methods without a table: tokens per call by shape, from replayed calls.
    replayed: dict[str, dict[str, float]]

    def of_kind(self, kind: str) -> dict[str, np.ndarray]:
        """Returns the tables of the methods whose `prediction.statistic` is `kind`."""
        names = [name for name in self.tables if statistic(get_method(name)) == kind]
        return {name: self.tables[name] for name in names}


class Candidate(NamedTuple):
    """A method on a tree, with its predicted speed."""

    method: Method
    shape: str
    tokens_per_call: float
    tokens_per_second: float


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, again: bool = False
) -> dict[str, Any]:
    """Predicts all candidates, runs the best, and writes the table and the recommendation to
    `workdir`.

    Predictions and candidates depend on these measurements only.

    Raises:
      Finished: unless `again`, if `workdir` holds this table already.
      UserError: the config, models, prompts or workdir are invalid, before any measurement.
    """
    check_auto_config(config)
    target, (draft,), prompts = measurement.open_table(config, workdir, NAME, (config.draft,))
    journal = Journal(workdir, NAME, config, report.weights(target, draft), again, prompts.digest())
    bench = Bench(config, target, [draft], prompts, journal)
    statistics, times = measure_statistics(bench), measure_times(bench)
    predicted = candidates(config, statistics, times)
    tried = try_all(bench, to_try(config, predicted))
    result = {
        "title": f"The fastest method for {config.target} with drafts of {config.draft}, batch "
        f"{config.batch_size}",
        "rows": tried,
        "predicted": [_predicted(candidate) for candidate in predicted],
        # R, and the probability that some of k i.i.d. drafts carry the token.
        "acceptance_by_child": {
            name: R.tolist() for name, R in statistics.of_kind(CHILDREN).items()
        },
        "acceptance_by_drafts": {
            name: (1 - carriers[1:, 0]).tolist()
            for name, carriers in statistics.of_kind(CARRIERS).items()
        },
        "together": times.in_call_factor,
        "target_ms": {str(count): times.target(count) * 1e3 for count in counted(config.size)},
        "prompts": prompts.real,
        "answer": answer(tried),
        "warning": warning(tried),
    }
    finished = journal.finish(result, markdown)
    if finished["warning"]:
        print(finished["warning"], file=sys.stderr)
    return finished


def check_auto_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, auto_config())
    measurement.check_decoding(config)
    check_positive(config, "num_drafts", "draft_lengths", "size", "tries")
    measurement.check_has_acceptance(config)
    for name in config.methods:
        if statistic(get_method(name)) is None and not can_be_replayed(get_method(name)):
            raise UserError(
                f"methods={name!r}: cannot be predicted, because it does not draft from a draft "
                "model, i.i.d. or without replacement; leave it out"
            )
        if on_chains(name, 1) is None:
            raise UserError(
                f"methods={name!r}: takes no tree and no draft_length to search; leave it out"
            )
        if statistic(get_method(name)) is None and not _parts(config, name):
            raise UserError(
                f"num_drafts={tuple(config.num_drafts)}: {name!r} needs at least 2 chains that fit "
                f"size={config.size}; add 2, or raise size"
            )


def measure_statistics(bench: Bench) -> Statistics:
    """Measures the acceptance of the config's methods on batch trees.

    One run with i.i.d. drafts serves all methods that draft so, because the first k drafts are k
    i.i.d. drafts. Methods without a `prediction.statistic` are replayed on chains.
    """
    config, draft = bench.config, bench.drafts[0]
    tree = tree_lib.batch(max(2, *config.num_drafts))
    methods = [get_method(name) for name in dict.fromkeys(config.methods)]
    iid = tuple(method for method in methods if statistic(method) in (CARRIERS, WINNERS))
    contenders = {
        # Any tree will do, because the plan's acceptance is measured.
        f"acceptance of {method.name}": Contender(
            dataclasses.replace(method, tree=tree), draft, observe_nodes
        )
        for method in methods
        if statistic(method) == CHILDREN
    }
    if iid:
        walked = dataclasses.replace(iid[0], tree=tree)  # Any of them will do.
        entry = f"acceptance of {', '.join(method.name for method in iid)}"
        contenders[entry] = Contender(walked, draft, observe_drafts(iid))
    # For the lengths of sequences, which do not depend on the method.
    contenders = contenders or {"baseline": Contender(get_method("baseline"), None)}
    tables, runs = {}, bench.measure_all(contenders, config.seeds[:1])
    for entry, (run,) in runs.items():
        if contenders[entry].observe is observe_nodes:
            accepted = run.observed["nodes"][1:] / run.observed["nodes"][0]
            R = tree_search.descending(accepted.tolist())
            tables[contenders[entry].method.name] = np.array(R)
        else:
            tables |= {name: shares(counts) for name, counts in run.observed.items()}
    replayed = {
        method.name: _replayed(bench, method) for method in methods if statistic(method) is None
    }
    tokens = next(iter(runs.values()))[0].tokens / bench.prompts.real
    return Statistics(tables, tokens, replayed)


def _replayed(bench: Bench, method: Method) -> dict[str, float]:
    """Returns a method's tokens per call on K chains of L, by shape, for each K > 1 and L.

    One run drafts a tree that covers all these shapes, and `measure.replay` counts what the method
    would emit on each of them.
    """
    config, parts = bench.config, _parts(bench.config, method.name)
    # Any plan with this drafting rule will do; the method's own verifier may refuse this tree.
    plans: dict[Any, str] = {
        rules.IID: "otm",
        rules.WITHOUT_REPLACEMENT: "recursive_without_replacement",
    }
    verifier = TokenByToken(transport.get(plans[method.verifier.rule]))
    drawn = Method(method.name, covering(part.tree for part in parts.values()), verifier)
    contender = Contender(drawn, bench.drafts[0], observe_replays(tuple(parts.values())))
    entry = f"{method.name} replayed"
    observed = bench.measured(entry, contender, config.seeds[0], batches=1).observed
    return dict(zip(parts, (observed["emitted"] / observed["calls"]).tolist(), strict=True))


def _parts(config: ml_collections.ConfigDict, name: str) -> dict[str, Method]:
    """Returns a method on K chains of L, by shape, for each K > 1 and L that fit `size`."""
    parts = {}
    for branching in _chains(config):
        tree = tree_lib.prefix_tree(*branching)
        part = on_tree(name, tree)
        if branching[0] > 1 and tree.size <= config.size and part is not None:
            parts[tree_lib.spelled(branching)] = part
    return parts


def _chains(config: ml_collections.ConfigDict) -> list[tuple[int, ...]]:
    """Returns K chains of L for each K and L of the config, as numbers of children."""
    sizes = itertools.product(config.num_drafts, config.draft_lengths)
    return [(number, *[1] * (length - 1)) for number, length in sizes]


def candidates(
    config: ml_collections.ConfigDict, statistics: Statistics, times: Times
) -> list[Candidate]:
    """Returns the baseline, and every method on its chains, prefix trees or optimal trees, the
    fastest first."""
    result = []
    for method, shape, per_call in _searched(config, statistics):
        calls = statistics.tokens / per_call
        seconds = calls * call_time(times, method.name, method.tree, per_call)
        seconds += times.start[bool(method.tree.size)]
        per_second = config.batch_size * statistics.tokens / seconds
        result.append(Candidate(method, shape, per_call, per_second))
    return sorted(result, key=lambda candidate: -candidate.tokens_per_second)


def _searched(
    config: ml_collections.ConfigDict, statistics: Statistics
) -> Iterator[tuple[Method, str, float]]:
    """Yields each method and shape, with the expected tokens per call."""
    yield get_method("baseline"), "-", 1.0
    widest, highest, size = max(config.num_drafts), max(config.draft_lengths), config.size
    shapes = {*_chains(config), *tree_search.prefix_shapes(widest, highest, size)}
    prefix_trees = {tree_lib.spelled(ks): tree_lib.prefix_tree(*ks) for ks in sorted(shapes)}
    for name, table in statistics.tables.items():
        tokens, one_chain = prediction.predictor(get_method(name), table), cannot_branch(name)
        if statistic(get_method(name)) == CHILDREN:
            trees = _optimal_trees(table.tolist(), size, highest)
        else:
            trees = {
                shape: tree
                for shape, tree in prefix_trees.items()
                if (tree.size == tree.height) == one_chain and tree.size <= size
            }
        for shape, tree in trees.items():
            method = on_tree(name, tree)
            if method is not None:
                yield method, shape, tokens(tree)
    for name, replayed in statistics.replayed.items():
        for shape, per_call in replayed.items():
            options = options_for(name, tree_lib.parse(shape)) or {}
            yield get_method(name, **options), shape, per_call


def _optimal_trees(R: list[float], size: int, height: int) -> dict[str, Tree]:
    """Returns the optimal trees of 1, 2, ... nodes by name."""
    most = min(size, sum(len(R) ** level for level in range(1, height + 1)))
    order = optimal_order(R, most, height)
    return {f"optimal of {number}": tree_of(order[:number]) for number in range(1, most + 1)}


def to_try(config: ml_collections.ConfigDict, predicted: list[Candidate]) -> list[Candidate]:
    """Returns the baseline and `tries` candidates of the sorted `predicted`: the best of each
    method, then the best of the others."""
    baseline = next(candidate for candidate in predicted if not candidate.method.tree.size)
    others = [candidate for candidate in predicted if candidate is not baseline]
    best = {candidate.method.name: candidate for candidate in reversed(others)}.values()
    others.sort(key=lambda candidate: candidate not in best)
    return [baseline, *others[: config.tries]]


def answer(rows: list[dict[str, Any]]) -> str:
    """Returns the recommendation as a sentence."""
    best = max(rows, key=lambda row: row["speedup"])
    if best is rows[0]:
        return "Use the baseline: no other method that was run is faster here."
    return (
        f'Use `get_method("{best["method"]}", {best["options"]})`: '
        f"{best['measured_per_second']:,.1f} tokens/s, {best['speedup']:.2f} x the baseline."
    )


def warning(rows: list[dict[str, Any]]) -> str:
    """Returns a line if the tried candidates are `FAR_APART` from their predictions, else ""."""
    ratios = [row["tokens_per_second"] / row["measured_per_second"] for row in rows]
    middle = np.argsort(ratios)[len(ratios) // 2]  # The candidate with the median ratio.
    if 1 / FAR_APART < ratios[middle] < FAR_APART:
        return ""
    row = rows[middle]
    return (
        f"warning: predicted and measured speeds are far apart: for {row['method']}, the median "
        f"case, {row['tokens_per_second']:,.1f} and {row['measured_per_second']:,.1f} tokens/s; "
        "other programs may have used the machine; close them, and run again with a new --workdir"
    )


def markdown(result: dict[str, Any]) -> str:
    """Returns the answer, the table and its provenance, as Markdown."""
    columns: report.Columns = {
        "Method": lambda row: f"`{row['method']}`",
        "Tree": lambda row: row["shape"],
        "Nodes": lambda row: row["nodes"],
        "Tokens/call": lambda row: f"{row['measured_per_call']:.2f}",
        "Tokens/call, predicted": lambda row: f"{row['tokens_per_call']:.2f}",
        "Tokens/s": lambda row: f"{row['measured_per_second']:,.1f}",
        "Tokens/s, predicted": lambda row: f"{row['tokens_per_second']:,.1f}",
        "Speedup": lambda row: f"{row['speedup']:.2f}",
    }
    config = result["config"]
    calls = ", ".join(f"{ms:.1f} ms on {count}" for count, ms in result["target_ms"].items())
    notes = [
        f"{len(result['predicted'])} candidates were predicted (all are in `{NAME}.json`). The "
        f"prediction uses the measured times of a target call ({calls} new tokens per sequence), "
        "of drafting a level, of selecting a token and of starting a sequence, and the acceptance "
        "at a node, which is assumed to be the same at all nodes. Inside a call the parts take "
        f"{result['together']:.2f} x as long as alone. The baseline, the best candidate of each "
        "method and the best of the others were run.",
        "They took turns on each seed. Tokens/s and speedups are medians over the seeds.",
        f"{result['prompts']} prompts, up to {config['max_new_tokens']} new tokens, batch "
        f"{config['batch_size']}, {config['dtype']}, {report.temperatures(config)}. Tokens/s are "
        "over the batch and include the call on the prompt. The prediction ignores that the "
        "sequences of a batch end at different times.",
        report.provenance_line(result),
    ]
    told = [result["answer"], result["warning"], report.table(columns, result["rows"])]
    table = "\n\n".join(part for part in told if part)
    return report.page(result["title"], table, notes)


def try_all(bench: Bench, chosen: list[Candidate]) -> list[dict[str, Any]]:
    """Returns a row for each chosen candidate; the first one is the baseline.

    The candidates take turns on each seed; ratios are medians over seeds. After a stop, the two
    speeds of a ratio may come from two processes.
    """
    contenders = {
        f"{candidate.method.name} {candidate.shape}": Contender(candidate.method, bench.drafts[0])
        for candidate in chosen
    }
    runs = list(bench.measure_all(contenders, bench.config.seeds, warm_up=True).values())
    speeds = np.array([[run.per_second for run in of_seeds] for of_seeds in runs])
    return [
        {
            **_predicted(candidate),
            "nodes": candidate.method.tree.size,
            "levels": candidate.method.tree.height,
            "parents": list(candidate.method.tree.parents),
            "options": _options(candidate),
            "measured_per_call": float(np.mean([run.per_call for run in of_seeds])),
            "measured_per_second": float(np.median(speed)),
            "speedup": float(np.median(speed / speeds[0])),
        }
        for candidate, of_seeds, speed in zip(chosen, runs, speeds, strict=True)
    ]


def _predicted(candidate: Candidate) -> dict[str, Any]:
    return {**candidate._asdict(), "method": candidate.method.name}


def _options(candidate: Candidate) -> str:
    """Returns the arguments of `get_method` as code."""
    options = options_for(candidate.method.name, candidate.method.tree) or {}
    if "tree" not in options:
        return ", ".join(f"{option}={value}" for option, value in options.items())
    if candidate.shape[0].isdigit():
        return f'tree="{candidate.shape}"'
    return f"tree=Tree({options['tree'].parents})"
