"""Times of the parts of a call on this machine, and from them the time of any method on any
tree."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding import tree as tree_lib
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.methods import cannot_branch, on_tree
from spectr_jax.decoding.tree import Tree
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.call_times import (
    PHASES,
    Timer,
    call_seconds,
    phase_timers,
    timed_once,
    token_timer,
)
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.frozen import freeze

STARTED = "speculative"
"""The method from which the cost of starting a sequence with a draft is measured."""


class Times(NamedTuple):
    """Seconds on this machine, as functions of a number of tokens or drafts. `select` is by method,
    per chosen token.

    `together` is the time of the parts inside a call divided by their separate times. `start`
    is the
    time to start a sequence, without and with drafts.
    """

    target: Callable[[int], float]
    together: float
    start: tuple[float, float]
    first_level: Callable[[int], float]
    level: Callable[[int], float]
    select: dict[str, Callable[[int], float]]


def measure_times(bench: Bench) -> Times:
    """Measures target calls, and drafting and selection by the phases of calls on few chains."""
    config, journal, target, draft = bench.config, bench.journal, bench.target, bench.drafts[0]
    batch, context = config.batch_size, config.prompt_tokens + config.max_new_tokens // 2
    widths, counts = sorted(set(config.num_drafts)), counted(config.size)

    def calls() -> list[float]:
        seconds = call_seconds(target.model, batch, counts, context)
        return [seconds(count) for count in counts]

    target_seconds = _between(counts, journal.value("calls of the target", calls))

    def phases(width: int, length: int, **options) -> Callable[[], dict[str, Timer]]:
        method = get_method("spectr", num_drafts=width, draft_length=length)
        return functools.partial(
            phase_timers, method, target.model, draft.model, batch, context, **options
        )

    lengths = {
        (width, length): phases(width, length, phases=("draft",))
        for width in widths
        for length in (1, 4)
    }
    drafting = timed_once(journal, "drafting", lengths)
    first = [drafting[width, 1]["draft"] for width in widths]
    level = [
        max(drafting[width, 4]["draft"] - drafting[width, 1]["draft"], 0.0) / 3 for width in widths
    ]
    choosing = {
        (name, width): functools.partial(token_timer, method, target.model.vocab_size, batch)
        for name in dict.fromkeys([*config.methods, STARTED])
        for width in ([1] if cannot_branch(name) else widths)
        if (method := on_chains(name, width)) is not None
    }
    chosen, select = timed_once(journal, "selection", choosing), {}
    for name in dict.fromkeys(method for method, _ in choosing):
        measured = {width: seconds for (method, width), seconds in chosen.items() if method == name}
        select[name] = _between(list(measured), list(measured.values()))
    started = get_method("baseline"), get_method(STARTED, draft_length=1)
    texts = [functools.partial(_text_timer, method, config, target, draft) for method in started]
    whole = timed_once(journal, "whole calls", {"call": phases(2, 2), **dict(enumerate(texts))})
    together = whole["call"]["call"] / sum(whole["call"][phase] for phase in PHASES)
    times = Times(
        target_seconds,
        together,
        (0.0, 0.0),
        _between(widths, first),
        _between(widths, level),
        select,
    )
    start = [
        max(0.0, whole[at] - call_time(times, STARTED, method.tree, 1))
        for at, method in enumerate(started)
    ]
    return times._replace(start=(start[0], start[1]))


def call_time(times: Times, name: str, tree: Tree, expected: float) -> float:
    """Returns the seconds of a call that emits `expected` tokens."""
    if not tree.size:
        return times.target(1)
    widths = [len(np.intersect1d(level, tree.inner)) for level in tree.levels[:-1]]
    # The first level costs as much as its children, the others as much as their parents.
    drafting = times.first_level(len(tree.levels[1])) + sum(map(times.level, widths[1:]))
    select = expected * times.select[name](max(len(tree.levels[1]), widths[-1]))
    return times.together * (drafting + times.target(tree.size + 1) + select)


def on_chains(name: str, width: int) -> Method | None:
    """Returns the method on `width` chains, for timing its selection."""
    return on_tree(name, tree_lib.iid_chains(width, 4))


def counted(size: int) -> list[int]:
    """Returns the numbers of tokens on which calls are timed, up to `size` nodes and the root."""
    return [*(count for count in (1, 2, 3, 5, 9, 17, 33, 65, 129) if count <= size), size + 1]


def _text_timer(
    method: Method, config: ml_collections.ConfigDict, target: Trained, draft: Trained
) -> Timer:
    """Returns a timer of sequences of one new token."""
    models = freeze(target.model), freeze(draft.model)
    prompts = np.ones((config.batch_size, config.prompt_tokens + 1), np.int32)
    lengths = np.full(config.batch_size, prompts.shape[1])

    def one(seed: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(generate(jax.random.key(seed), method, *models, prompts, lengths, 1))
        return time.perf_counter() - started

    one(0)
    return lambda: float(np.median([one(seed) for seed in range(1, 12)]))


def _between(numbers: list[int], seconds: list[float]) -> Callable[[int], float]:
    """Returns a function that interpolates between measured numbers, and is proportional beyond
    the last."""
    return lambda number: (
        float(np.interp(number, numbers, seconds)) * max(1.0, number / numbers[-1])
    )
