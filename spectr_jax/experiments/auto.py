"""Which method, K, L or tree is fastest here, with these models? Predicted from measured parts, then tried.

Measured once: call times of both models, times of drafting a level and of choosing a token, and what drafts of the pair are
accepted. From these follow the tokens a second of every candidate; the best are run, beside what was predicted.
"""

import functools
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import tqdm

from spectr_jax.config import auto_config, check_fields, check_positive
from spectr_jax.decoding import Method, get_method, prediction, tree_search
from spectr_jax.decoding import tree as tree_lib
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.tree import Tree
from spectr_jax.errors import UserError
from spectr_jax.loading import Trained
from spectr_jax.measure import measurement, report
from spectr_jax.measure.acceptance import observe_carriers, observe_nodes, observe_winners, shares
from spectr_jax.measure.call_times import PHASES, Timer, call_seconds, phase_timers, timed_once, token_timer
from spectr_jax.measure.journal import Journal
from spectr_jax.measure.measurement import Program
from spectr_jax.models.frozen import freeze

NAME = "auto"
PLAN_OF = {
    "speculative": "otm",  # One draft: all plans are maximal coupling.
    "spectr": "kseq",
    "otm": "otm",
    "block": "otm",
    "otm_block": "otm",
    "gbv": "greedy_multipath",
}
BLOCK = ("block", "otm_block", "gbv")
CHAINS = ("speculative", "block")
DISTINCT = ("gsd", "ersd")


class Acceptance(NamedTuple):
    """What drafts of the pair were seen to do.

    Attributes:
      carriers: by plan, as in `decoding.tree_search`.
      winners: by plan, as in `decoding.prediction`.
      R: by method, [K] acceptance by child index.
      tokens: a text has, on average.
    """

    carriers: dict[str, np.ndarray]
    winners: dict[str, np.ndarray]
    R: dict[str, list[float]]
    tokens: float


class Times(NamedTuple):
    """Seconds on this machine, functions of a number of tokens or drafts; `select` by method, for a chosen token.

    `together`: how many times as long the parts of a call take in it as alone. `start`: of a text, without and with drafts.
    """

    target: Callable[[int], float]
    together: float
    start: tuple[float, float]
    first_level: Callable[[int], float]
    level: Callable[[int], float]
    select: dict[str, Callable[[int], float]]


class Candidate(NamedTuple):
    """A method on a tree, and what is predicted of it."""

    name: str
    shape: str
    method: Method
    tokens_per_call: float
    tokens_per_second: float


def run(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Measures, predicts, tries the best, and writes the table and the recommendation to `workdir`.

    What it has measured is in a journal there until it is done: the same command goes on after a stop. Predictions follow
    from that alone, and so does what is tried.

    Raises:
      UserError: anything wrong with the config, the models, the prompts or the workdir, before any measurement.
    """
    check_auto_config(config)
    target, (draft,), prompts = measurement.open_run(config, workdir, NAME, (config.draft,))

    journal = Journal(workdir, NAME, config)
    started = time.monotonic() - journal.seconds

    def measured(method: Method, seed: int, **kwargs) -> measurement.Measurement:
        return measurement.measure(method, target, draft, prompts, config, seed, **kwargs)

    def compile_ahead(programs: list[tuple[Method, Callable | None]]) -> None:
        known = [Program(method, draft, observe) for method, observe in programs]
        measurement.compile_ahead(known, target, prompts, config)

    acceptance = measure_acceptance(config, compile_ahead, measured, prompts.real, journal)
    times = measure_times(config, target, draft, journal)
    found = sorted(candidates(config, acceptance, times), key=lambda each: -each.tokens_per_second)
    tried = try_all(to_try(config, found), config.seeds, compile_ahead, measured, journal)
    result = {
        "title": f"The fastest method for {config.target}, drafts of {config.draft}, {config.batch_size} texts at once",
        "rows": tried,
        "predicted": [_row(each) for each in found],
        "acceptance_by_child": acceptance.R,
        "acceptance_by_drafts": {name: (1 - table[1:, 0]).tolist() for name, table in acceptance.carriers.items()},
        "together": times.together,
        "target_ms": {str(count): times.target(count) * 1e3 for count in _counts(config.size)},
        "prompts": prompts.real,
        **report.about(config, started),
    }
    result["answer"] = answer(tried)
    report.write(workdir, NAME, result, markdown(result))
    journal.remove()
    return result


def check_auto_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for a config that cannot be evaluated."""
    check_fields(config, auto_config())
    measurement.check_decoding(config)
    check_positive(config, "num_drafts", "draft_lengths", "size", "tries")
    if config.temperature == 0:
        raise UserError("temperature=0.0 has no acceptance to measure; give a positive one, such as 1.0")
    for name in config.methods:
        if name not in (*PLAN_OF, *DISTINCT):
            raise UserError(f"methods has {name!r}, which has no prediction; known are {', '.join([*PLAN_OF, *DISTINCT])}")


def measure_acceptance(
    config: ml_collections.ConfigDict, compile_ahead, measured, texts: int, journal: Journal
) -> Acceptance:
    """What batch trees show: the first k of their drafts are k drafts, for every k."""
    tree = tree_lib.batch(max(2, *config.num_drafts))
    distinct = dict.fromkeys(each for each in config.methods if each in DISTINCT)
    observers = {"spectr": observe_carriers, "otm": observe_winners} | dict.fromkeys(distinct, observe_nodes)
    programs = {name: (get_method(name, tree=tree), observe) for name, observe in observers.items()}
    entries = {name: f"acceptance of {name}" for name in programs}
    compile_ahead([program for name, program in programs.items() if entries[name] not in journal])
    seen = {
        name: journal.measurement(entries[name], functools.partial(measured, method, config.seeds[0], observe=observe))
        for name, (method, observe) in programs.items()
    }
    one, winners, R = seen["spectr"], seen["otm"].observed, {}
    for name in distinct:
        nodes = seen[name].observed["nodes"]
        R[name] = tree_search.descending((nodes[1:] / nodes[0]).tolist())
    return Acceptance(
        {plan: shares(counts) for plan, counts in one.observed.items()},
        {plan: shares(counts) for plan, counts in winners.items()},
        R,
        one.tokens / texts,
    )


def measure_times(config: ml_collections.ConfigDict, target: Trained, draft: Trained, journal: Journal) -> Times:
    """Call times of the target, and of drafting and selection by phases of calls on few chains."""
    batch, context = config.batch_size, config.prompt_tokens + config.max_new_tokens // 2
    widths, counts = sorted(set(config.num_drafts)), _counts(config.size)

    def calls() -> list[float]:
        seconds = call_seconds(target.model, batch, counts, context)
        return [seconds(count) for count in counts]

    target_seconds = _between(counts, journal.value("calls of the target", calls))

    def phases(width: int, length: int, **options) -> Callable[[], dict[str, Timer]]:
        method = get_method("spectr", num_drafts=width, draft_length=length)
        return functools.partial(phase_timers, method, target.model, draft.model, batch, context, **options)

    lengths = {(width, length): phases(width, length, phases=("draft",)) for width in widths for length in (1, 4)}
    drafting = timed_once(journal, "drafting", lengths)
    first = [drafting[width, 1]["draft"] for width in widths]
    level = [max(drafting[width, 4]["draft"] - drafting[width, 1]["draft"], 0.0) / 3 for width in widths]
    choosing = {
        (name, width): functools.partial(token_timer, _method(name, (width, 1, 1, 1)), target.model.vocab_size, batch)
        for name in config.methods
        for width in _widths(name, widths)
    }
    chosen, select = timed_once(journal, "selection", choosing), {}
    for name in config.methods:
        select[name] = _between(_widths(name, widths), [chosen[name, width] for width in _widths(name, widths)])
    started = get_method("baseline"), get_method("speculative", draft_length=1)
    texts = [functools.partial(_text_timer, method, config, target, draft) for method in started]
    whole = timed_once(journal, "whole calls", {"call": phases(2, 2), **dict(enumerate(texts))})
    together = whole["call"]["call"] / sum(whole["call"][phase] for phase in PHASES)
    times = Times(target_seconds, together, (0.0, 0.0), _between(widths, first), _between(widths, level), select)
    start = [max(0.0, whole[at] - _call(times, "speculative", method.tree, 1)) for at, method in enumerate(started)]
    return times._replace(start=(start[0], start[1]))


def candidates(config: ml_collections.ConfigDict, acceptance: Acceptance, times: Times) -> Iterator[Candidate]:
    """The baseline; every method on its chains, prefix trees or optimal trees."""
    yield _candidate(config, acceptance, times, "baseline", "-", get_method("baseline"), 1.0)
    widest, highest = max(config.num_drafts), max(config.draft_lengths)
    shapes = {(number, *[1] * (length - 1)) for number in config.num_drafts for length in config.draft_lengths}
    shapes |= set(_prefix_shapes(widest, highest))
    block_tokens = {plan: prediction.block_predictor(table) for plan, table in acceptance.winners.items()}
    for name in config.methods:
        if name in DISTINCT:
            R = acceptance.R[name]
            most = min(config.size, sum(len(R) ** level for level in range(1, highest + 1)))
            order = tree_search.optimal_order(R, most, highest)
            for size in range(1, most + 1):
                tree = tree_search.tree_of(order[:size])
                expected = tree_search.expected_tokens(tree, R)
                yield _candidate(
                    config, acceptance, times, name, f"optimal of {size}", get_method(name, tree=tree), expected
                )
            continue
        for branching in sorted(shapes):
            chain = set(branching) == {1}
            if (name in CHAINS) != chain or tree_lib.prefix_tree(*branching).size > config.size:
                continue
            if name in BLOCK:
                expected = block_tokens[PLAN_OF[name]](branching)
            else:
                expected = tree_search.expected_tokens_iid(branching, acceptance.carriers[PLAN_OF[name]])
            spelled = ",".join(map(str, branching))
            yield _candidate(config, acceptance, times, name, spelled, _method(name, branching), expected)


def to_try(config: ml_collections.ConfigDict, found: list[Candidate]) -> list[Candidate]:
    """The baseline, the best of each method, and the best of the others, `tries` in all; `found` is sorted."""
    baseline = next(each for each in found if each.name == "baseline")
    best = {each.name: each for each in reversed(found) if each is not baseline}
    chosen = sorted(best.values(), key=lambda each: -each.tokens_per_second)[: config.tries]
    others = [each for each in found if each is not baseline and each not in chosen]
    return [baseline, *chosen, *others[: config.tries - len(chosen)]]


def answer(rows: list[dict[str, Any]]) -> str:
    """What to use, in a sentence."""
    best = max(rows, key=lambda row: row["speedup"])
    if best is rows[0]:
        return "Use the baseline: nothing that was tried is faster here."
    option = f"draft_length={best['levels']}" if best["method"] in CHAINS else f'tree="{best["shape"]}"'
    if best["method"] in DISTINCT:
        option = f"tree=Tree({tuple(best['parents'])})"
    return (
        f'Use `get_method("{best["method"]}", {option})`: {best["measured_per_second"]:,.1f} tokens/s, '
        f"{best['speedup']:.2f} x the baseline."
    )


def markdown(result: dict[str, Any]) -> str:
    """The answer, the table and its provenance, as Markdown."""
    header = ["Method", "Tree", "Nodes", "Tokens per call", "measured", "Tokens/s", "measured", "ratio", "x baseline"]
    rows = []
    for row in result["rows"]:
        ratio = row["tokens_per_second"] / row["measured_per_second"]
        rows.append(
            [
                f"`{row['method']}`",
                row["shape"],
                str(row["nodes"]),
                f"{row['tokens_per_call']:.2f}",
                f"{row['measured_per_call']:.2f}",
                f"{row['tokens_per_second']:,.1f}",
                f"{row['measured_per_second']:,.1f}",
                f"{ratio:.2f}",
                f"{row['speedup']:.2f}",
            ]
        )
    config, calls = result["config"], result["target_ms"]
    notes = [
        result["answer"],
        f"{len(result['predicted'])} candidates were predicted from measured parts (`{NAME}.json` has all): the call of the "
        f"target ({', '.join(f'{count}: {ms:.1f} ms' for count, ms in calls.items())} by tokens), drafting a level, "
        "choosing a token, starting a text, and what drafts were seen to do at a node, taken to be alike at all nodes "
        f"(0-th order). The parts of a call take {result['together']:.2f} x as long in it as alone, measured once. Tried "
        "were the baseline, the best of each method, and the best of the rest. `ratio`: predicted over measured tokens/s.",
        "Those that were tried took turns on each seed; tokens/s and `x baseline` are medians over the seeds.",
        f"{result['prompts']} prompts, up to {config['max_new_tokens']} new tokens, batch {config['batch_size']}, "
        f"{config['dtype']}, temperature {config['temperature']}; tokens/s with the call on the prompt, over the batch. In "
        "a batch texts end at different times, which the prediction leaves out.",
        report.made_by(result),
    ]
    return f"# {result['title']}\n\n{report.markdown_table(header, rows)}\n\n" + "\n\n".join(notes) + "\n"


def _candidate(config, acceptance: Acceptance, times: Times, name: str, shape: str, method: Method, expected: float):
    calls = acceptance.tokens / expected
    seconds = times.start[bool(method.tree.size)] + calls * _call(times, name, method.tree, expected)
    return Candidate(name, shape, method, expected, config.batch_size * acceptance.tokens / seconds)


def _call(times: Times, name: str, tree: Tree, expected: float) -> float:
    """Seconds of a call that emits `expected` tokens."""
    if not tree.size:
        return times.target(1)
    widths = [len(np.intersect1d(level, tree.inner)) for level in tree.levels[:-1]]
    # The first level costs what its children cost; the others what their parents do.
    drafting = times.first_level(len(tree.levels[1])) + sum(map(times.level, widths[1:]))
    select = expected * times.select[name](max(len(tree.levels[1]), widths[-1])) if name in times.select else 0.0
    return times.together * (drafting + times.target(tree.size + 1) + select)


def _text_timer(method: Method, config: ml_collections.ConfigDict, target: Trained, draft: Trained) -> Timer:
    """Of texts of one new token."""
    models = freeze(target.model), freeze(draft.model)
    prompts = np.ones((config.batch_size, config.prompt_tokens + 1), np.int32)
    lengths = np.full(config.batch_size, prompts.shape[1])

    def one(seed: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(generate(jax.random.key(seed), method, *models, prompts, lengths, 1))
        return time.perf_counter() - started

    one(0)
    return lambda: float(np.median([one(seed) for seed in range(1, 12)]))


def try_all(chosen: list[Candidate], seeds, compile_ahead, measured, journal: Journal) -> list[dict[str, Any]]:
    """What the chosen ones do, the baseline first; they take turns on each seed, and ratios are medians of the seeds'.

    An entry of the journal is one of them on one seed; after a stop, ratios of that seed may be of two processes.
    """

    def entry(seed: int, candidate: Candidate) -> str:
        return f"{candidate.name} {candidate.shape} on seed {seed}"

    missing = [candidate for candidate in chosen if not all(entry(seed, candidate) in journal for seed in seeds)]
    compile_ahead([(candidate.method, None) for candidate in missing])
    for candidate in missing:
        measured(candidate.method, seeds[0], batches=1)  # The first run is not timed.
    turns = [(seed, candidate) for seed in seeds for candidate in chosen]
    seen = [
        journal.measurement(entry(seed, candidate), functools.partial(measured, candidate.method, seed))
        for seed, candidate in tqdm.tqdm(turns, "tried", dynamic_ncols=True)
    ]
    speeds = np.array([each.tokens / each.seconds for each in seen]).reshape(len(seeds), -1)
    per_call = np.array([each.tokens / each.calls for each in seen]).reshape(len(seeds), -1)
    return [
        {
            **_row(candidate),
            "nodes": candidate.method.tree.size,
            "levels": candidate.method.tree.height,
            "parents": list(candidate.method.tree.parents),
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


def _method(name: str, branching: tuple[int, ...]) -> Method:
    if name in CHAINS:
        return get_method(name, draft_length=len(branching))
    return get_method(name, tree=tree_lib.prefix_tree(*branching))


def _prefix_shapes(width: int, height: int) -> Iterator[tuple[int, ...]]:
    """All (k_1, ..., k_L) of at most `width` leaves and `height` levels."""
    if not height:
        return
    for first in range(1, width + 1):
        yield (first,)
        for rest in _prefix_shapes(width // first, height - 1):
            yield (first, *rest)


def _widths(name: str, widths: list[int]) -> list[int]:
    return [1] if name in CHAINS else widths


def _counts(size: int) -> list[int]:
    """Numbers of tokens to measure calls on, up to `size` nodes and the root."""
    return [*(count for count in (1, 2, 3, 5, 9, 17, 33, 65, 129) if count <= size), size + 1]


def _between(numbers: list[int], seconds: list[float]) -> Callable[[int], float]:
    """Interpolates between measured numbers; beyond the last, in proportion to the number."""
    return lambda number: float(np.interp(number, numbers, seconds)) * max(1.0, number / numbers[-1])
