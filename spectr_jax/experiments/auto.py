"""The fastest method, K, L and tree for a pair of models on this machine: predicted, then tried.

Call times of both models, times of drafting a level and of selecting a token, and the acceptance of
the pair are measured once. From these the tokens per second of every candidate are predicted. The
best candidates are run and printed next to their predictions.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_collections
import numpy as np
import tqdm

from spectr_jax import transport
from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding import tree as tree_lib
from spectr_jax.decoding.methods import cannot_branch, on_tree, options_for
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers import TokenByToken
from spectr_jax.experiments.call_parts import Times, call_time, counted, measure_times, on_chains
from spectr_jax.experiments.config import auto_config
from spectr_jax.experiments.measure import measurement, report
from spectr_jax.experiments.measure.acceptance import observe_drafts, observe_nodes, shares
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Program
from spectr_jax.experiments.measure.replay import can_be_replayed, covering, observe_replays
from spectr_jax.experiments.planning import prediction, tree_search
from spectr_jax.experiments.planning.prediction import CARRIERS, CHILDREN, statistic
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError

NAME = "auto"


class Acceptance(NamedTuple):
    """The measured acceptance of the pair.

    Attributes:
      tables: by method, the argument of `prediction.predictor`.
      tokens: mean number of tokens of a sequence.
      replayed: for methods without such a table, tokens per call by shape, from replayed calls.
    """

    tables: dict[str, np.ndarray]
    tokens: float
    replayed: dict[str, dict[str, float]]


class Candidate(NamedTuple):
    """A method on a tree, with its predicted speed."""

    name: str
    shape: str
    method: Method
    tokens_per_call: float
    tokens_per_second: float


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures, predicts, runs the best, and writes the table and the recommendation to `workdir`.

    A journal there keeps the measurements, so that after a stop the same command resumes.
    Predictions and candidates depend on these measurements only.

    Raises:
      UserError: the config, models, prompts or workdir are invalid, before any measurement.
    """
    check_auto_config(config)
    target, (draft,), prompts = measurement.open_table(config, workdir, NAME, (config.draft,))

    journal = Journal(workdir, NAME, config, report.weights(target, draft))
    bench = Bench(config, target, [draft], prompts, journal)
    acceptance = measure_acceptance(bench)
    times = measure_times(bench)
    found = sorted(candidates(config, acceptance, times), key=lambda each: -each.tokens_per_second)
    tried = try_all(bench, to_try(config, found))
    result = {
        "title": f"The fastest method for {config.target}, drafts of {config.draft}, {config.batch_size} sequences at once",
        "rows": tried,
        "predicted": [_row(each) for each in found],
        **acceptance_shown(acceptance),
        "together": times.together,
        "target_ms": {str(count): times.target(count) * 1e3 for count in counted(config.size)},
        "prompts": prompts.real,
        **journal.about(),
    }
    result["answer"] = answer(tried)
    report.write(workdir, NAME, result, markdown(result))
    journal.remove()
    return result


def check_auto_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, auto_config())
    measurement.check_decoding(config)
    check_positive(config, "num_drafts", "draft_lengths", "size", "tries")
    measurement.check_has_acceptance(config)
    for name in config.methods:
        if statistic(get_method(name)) is None and not can_be_replayed(get_method(name)):
            raise UserError(
                f"methods has {name!r}, which has no prediction; leave it out: predicted are "
                "methods of a draft model whose "
                "drafts are i.i.d. or without replacement"
            )
        if on_chains(name, 1) is None:
            raise UserError(
                f"methods has {name!r}, which takes no tree and no draft_length to search; leave "
                "it out"
            )


def measure_acceptance(bench: Bench) -> Acceptance:
    """Returns the acceptance that batch trees show for the plans of the config's methods.

    One run of i.i.d. drafts serves all plans, because the first k of them are k drafts. Other
    methods are replayed on chains.
    """
    config, journal = bench.config, bench.journal
    tree = tree_lib.batch(max(2, *config.num_drafts))
    methods = {
        name: get_method(name) for name in config.methods if statistic(get_method(name)) is not None
    }
    iid = tuple(method for method in methods.values() if statistic(method) != CHILDREN)
    programs = {
        # Any tree will do, because the plan's acceptance is measured.
        f"acceptance of {name}": Program(
            dataclasses.replace(method, tree=tree), bench.drafts[0], observe_nodes
        )
        for name, method in methods.items()
        if statistic(method) == CHILDREN
    }
    if iid:
        walked = dataclasses.replace(iid[0], tree=tree)  # Any of them will do.
        entry = f"acceptance of {', '.join(method.name for method in iid)}"
        programs[entry] = Program(walked, bench.drafts[0], observe_drafts(iid))
    bench.compile({entry: program for entry, program in programs.items() if entry not in journal})
    seen = {
        entry: bench.measured(entry, program, config.seeds[0])
        for entry, program in programs.items()
    }
    tables = {}
    for entry, program in programs.items():
        observed = seen[entry].observed
        if program.observe is observe_nodes:
            R = tree_search.descending((observed["nodes"][1:] / observed["nodes"][0]).tolist())
            tables[program.method.name] = np.array(R)
        else:
            tables |= {name: shares(counts) for name, counts in observed.items()}
    replayed = {name: _replayed(bench, name) for name in config.methods if name not in methods}
    if not seen:  # The length of a sequence does not depend on the method.
        seen = {
            "": bench.measured(
                "the baseline", Program(get_method("baseline"), None), config.seeds[0]
            )
        }
    return Acceptance(tables, next(iter(seen.values())).tokens / bench.prompts.real, replayed)


def _replayed(bench: Bench, name: str) -> dict[str, float]:
    """Returns tokens per call of a method on K chains of L, replayed on prompts that were
    decoded with its own drafts."""
    methods = {
        shape: method
        for shape, tree in _chains(bench.config).items()
        if tree.size <= bench.config.size and (method := on_tree(name, tree)) is not None
    }
    whole = covering(method.tree for method in methods.values())
    # Any plan with the same drafting rule will do; the method's own verifier may refuse this tree.
    plan = {"iid": "otm", "without_replacement": "recursive_without_replacement"}[
        get_method(name).verifier.rule
    ]
    drawn = Method(name, whole, TokenByToken(transport.get(plan)))
    program = Program(drawn, bench.drafts[0], observe_replays(tuple(methods.values())))
    observed = bench.measured(
        f"{name} replayed", program, bench.config.seeds[0], batches=1
    ).observed
    return dict(
        zip(methods, (np.array(observed["emitted"]) / observed["calls"]).tolist(), strict=True)
    )


def _chains(config: ml_collections.ConfigDict) -> dict[str, Tree]:
    """Returns K chains of L for K > 1 and the L of the config, by numbers of children."""
    numbers = [number for number in config.num_drafts if number > 1]
    shapes = [
        (number, *[1] * (length - 1)) for number in numbers for length in config.draft_lengths
    ]
    return {tree_lib.spelled(branching): tree_lib.prefix_tree(*branching) for branching in shapes}


def acceptance_shown(acceptance: Acceptance) -> dict[str, dict[str, list[float]]]:
    """Returns, by method, R and the share of i.i.d. drafts that carried the token, for the
    table's JSON."""
    tables = {
        name: (statistic(get_method(name)), table) for name, table in acceptance.tables.items()
    }
    return {
        "acceptance_by_child": {
            name: table.tolist() for name, (kind, table) in tables.items() if kind == CHILDREN
        },
        "acceptance_by_drafts": {
            name: (1 - t[1:, 0]).tolist() for name, (kind, t) in tables.items() if kind == CARRIERS
        },
    }


def candidates(
    config: ml_collections.ConfigDict, acceptance: Acceptance, times: Times
) -> Iterator[Candidate]:
    """Returns the baseline, and every method on its chains, prefix trees or optimal trees."""
    yield _candidate(config, acceptance, times, "baseline", "-", get_method("baseline"), 1.0)
    widest, highest = max(config.num_drafts), max(config.draft_lengths)
    shapes = {
        (number, *[1] * (length - 1))
        for number in config.num_drafts
        for length in config.draft_lengths
    }
    prefix_trees = {
        tree_lib.spelled(branching): tree_lib.prefix_tree(*branching)
        for branching in sorted(shapes | set(tree_search.prefix_shapes(widest, highest)))
    }
    for name, table in acceptance.tables.items():
        tokens, found, one_chain = (
            prediction.predictor(get_method(name), table),
            prefix_trees,
            cannot_branch(name),
        )
        if statistic(get_method(name)) == CHILDREN:
            found = _optimal_trees(table.tolist(), config.size, highest)
        for shape, tree in found.items():
            chain = tree.size == tree.height
            if tree.size > config.size or (found is prefix_trees and chain != one_chain):
                continue
            method = on_tree(name, tree)
            if method is not None:
                yield _candidate(config, acceptance, times, name, shape, method, tokens(tree))
    for name, replayed in acceptance.replayed.items():
        for shape, expected in replayed.items():
            method = get_method(name, **(options_for(name, tree_lib.parse(shape)) or {}))
            yield _candidate(config, acceptance, times, name, shape, method, expected)


def _optimal_trees(R: list[float], size: int, height: int) -> dict[str, Tree]:
    """Returns the optimal trees of 1, 2, ... nodes by name."""
    most = min(size, sum(len(R) ** level for level in range(1, height + 1)))
    order = tree_search.optimal_order(R, most, height)
    return {
        f"optimal of {number}": tree_search.tree_of(order[:number]) for number in range(1, most + 1)
    }


def to_try(config: ml_collections.ConfigDict, found: list[Candidate]) -> list[Candidate]:
    """Returns `tries` candidates of the sorted `found`: the baseline, the best of each method,
    and the best of the others."""
    baseline = next(each for each in found if not each.method.tree.size)
    best = {each.name: each for each in reversed(found) if each is not baseline}
    chosen = sorted(best.values(), key=lambda each: -each.tokens_per_second)[: config.tries]
    others = [each for each in found if each is not baseline and each not in chosen]
    return [baseline, *chosen, *others[: config.tries - len(chosen)]]


def answer(rows: list[dict[str, Any]]) -> str:
    """Returns the recommendation as a sentence."""
    best = max(rows, key=lambda row: row["speedup"])
    if best is rows[0]:
        return "Use the baseline: nothing that was tried is faster here."
    return (
        f'Use `get_method("{best["method"]}", {best["options"]})`: {best["measured_per_second"]:,.1f} tokens/s, '
        f"{best['speedup']:.2f} x the baseline."
    )


def markdown(result: dict[str, Any]) -> str:
    """Returns the answer, the table and its provenance, as Markdown."""
    header = ["Method", "Tree", "Nodes", "Tokens/call", "Measured", "Tokens/s", "Measured"]
    header += ["Predicted / measured", "Speedup"]
    rows = [
        [
            *(f"`{row['method']}`", row["shape"], str(row["nodes"])),
            *(f"{row['tokens_per_call']:.2f}", f"{row['measured_per_call']:.2f}"),
            *(f"{row['tokens_per_second']:,.1f}", f"{row['measured_per_second']:,.1f}"),
            f"{row['tokens_per_second'] / row['measured_per_second']:.2f}",
            f"{row['speedup']:.2f}",
        ]
        for row in result["rows"]
    ]
    config = result["config"]
    calls = ", ".join(f"{count}: {ms:.1f} ms" for count, ms in result["target_ms"].items())
    notes = [
        result["answer"],
        f"{len(result['predicted'])} candidates were predicted (all are in `{NAME}.json`) from the "
        f"measured times of a target call ({calls}, by tokens), of drafting a level, of selecting a "
        "token and of starting a sequence, and from the acceptance at a node, assumed to be the same "
        f"at all nodes. Inside a call the parts take {result['together']:.2f} x as long as alone. "
        "The baseline, the best of each method and the best of the rest were run.",
        "They took turns on each seed; tokens/s and speedups are medians over the seeds.",
        f"{result['prompts']} prompts, up to {config['max_new_tokens']} new tokens, batch "
        f"{config['batch_size']}, {config['dtype']}, {report.temperatures(config)}. Tokens/s are over "
        "the batch and include the call on the prompt. The prediction ignores that sequences of a "
        "batch end at different times.",
        report.made_by(result),
    ]
    return report.page(result["title"], report.markdown_table(header, rows), notes)


def _candidate(
    config,
    acceptance: Acceptance,
    times: Times,
    name: str,
    shape: str,
    method: Method,
    expected: float,
):
    calls = acceptance.tokens / expected
    seconds = times.start[bool(method.tree.size)] + calls * call_time(
        times, name, method.tree, expected
    )
    return Candidate(name, shape, method, expected, config.batch_size * acceptance.tokens / seconds)


def try_all(bench: Bench, chosen: list[Candidate]) -> list[dict[str, Any]]:
    """Runs the chosen candidates in turns on each seed, the baseline first. Ratios are medians over
    seeds.

    A journal entry is one candidate on one seed. After a stop, the ratios of that seed may come
    from two processes.
    """
    seeds = bench.config.seeds

    def entry(seed: int, candidate: Candidate) -> str:
        return f"{candidate.name} {candidate.shape} on seed {seed}"

    programs = [(candidate, Program(candidate.method, bench.drafts[0])) for candidate in chosen]
    missing = [
        each
        for each in programs
        if not all(entry(seed, each[0]) in bench.journal for seed in seeds)
    ]
    bench.compile(
        {f"{candidate.name} {candidate.shape}": program for candidate, program in missing}
    )
    for _, program in missing:
        bench.run(program, seeds[0], batches=1)  # The first run is not timed.
    turns = [(seed, *each) for seed in seeds for each in programs]
    seen = [
        bench.measured(entry(seed, candidate), program, seed)
        for seed, candidate, program in tqdm.tqdm(turns, "tried", dynamic_ncols=True)
    ]
    speeds = np.array([each.tokens / each.seconds for each in seen]).reshape(len(seeds), -1)
    per_call = np.array([each.tokens / each.calls for each in seen]).reshape(len(seeds), -1)
    return [
        {
            **_row(candidate),
            "nodes": candidate.method.tree.size,
            "levels": candidate.method.tree.height,
            "parents": list(candidate.method.tree.parents),
            "options": _options(candidate),
            "measured_per_call": float(np.mean(per_call[:, index])),
            "measured_per_second": float(np.median(speeds[:, index])),
            "speedup": float(np.median(speeds[:, index] / speeds[:, 0])),
        }
        for index, candidate in enumerate(chosen)
    ]


def _row(candidate: Candidate) -> dict[str, Any]:
    return {
        "method": candidate.name,
        "shape": candidate.shape,
        "tokens_per_call": candidate.tokens_per_call,
        "tokens_per_second": candidate.tokens_per_second,
    }


def _options(candidate: Candidate) -> str:
    """Returns the arguments of `get_method`, to be pasted."""
    options = options_for(candidate.name, candidate.method.tree) or {}
    if "tree" in options:
        return (
            f'tree="{candidate.shape}"'
            if candidate.shape[0].isdigit()
            else f"tree=Tree({options['tree'].parents})"
        )
    return ", ".join(f"{option}={value}" for option, value in options.items())
