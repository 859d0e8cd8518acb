"""Measures the parts of a call on this machine, and predicts the time of any method on any tree."""

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
from spectr_jax.decoding.tree import Tree
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.call_times import (
    PHASES,
    Timer,
    call_timer,
    phase_timers,
    timed,
    token_timer,
)
from spectr_jax.experiments.planning.on_tree import cannot_branch, on_tree
from spectr_jax.models.base import Model
from spectr_jax.models.frozen import freeze

STARTED = "speculative"
"""The method from which the cost of starting a sequence with a draft is measured."""


class Times(NamedTuple):
    """Seconds on this machine.

    Attributes:
      target: of a target call, by number of new tokens.
      in_call_factor: time of the parts inside a call, divided by the sum of their separate times.
      start: to start a sequence, without and with drafts.
      first_level: to draft the first level, by number of drafts.
      level: to draft another level, by number of drafts.
      select: to select one emitted token, by method and by number of drafts.
    """

    target: Callable[[int], float]
    in_call_factor: float
    start: tuple[float, float]
    first_level: Callable[[int], float]
    level: Callable[[int], float]
    select: dict[str, Callable[[int], float]]


def measure_times(bench: Bench) -> Times:
    """Measures target calls, and drafting and selection by the phases of calls on few chains."""
    config, target, draft = bench.config, bench.target.model, bench.drafts[0].model
    batch, context = config.batch_size, config.prompt_tokens + config.max_new_tokens // 2
    widths, measured = sorted(set(config.num_drafts)), functools.partial(timed, bench.journal)

    def phases(width: int, length: int, **options) -> Callable[[], dict[str, Timer]]:
        method = get_method("spectr", num_drafts=width, draft_length=length)
        return functools.partial(phase_timers, method, target, draft, batch, context, **options)

    calls = {
        count: functools.partial(call_timer, target, batch, count, context)
        for count in counted(config.size)
    }
    target_seconds = _between(measured("calls of the target", calls))
    drafting = {
        (width, length): phases(width, length, phases=("draft",))
        for width in widths
        for length in (1, 4)
    }
    drafted = {task: seconds["draft"] for task, seconds in measured("drafting", drafting).items()}
    level = {width: max(drafted[width, 4] - drafted[width, 1], 0.0) / 3 for width in widths}
    selection = {
        (name, width): functools.partial(token_timer, method, target.vocab_size, batch)
        for name in dict.fromkeys([*config.methods, STARTED])
        for width in ([1] if cannot_branch(name) else widths)
        if (method := on_chains(name, width)) is not None
    }
    selected: dict[str, dict[int, float]] = {}
    for (name, width), seconds in measured("selection", selection).items():
        selected.setdefault(name, {})[width] = seconds
    started = get_method("baseline"), get_method(STARTED, draft_length=1)
    starts = [functools.partial(_start_timer, method, config, target, draft) for method in started]
    whole = measured("whole calls", {"call": phases(2, 2), **dict(enumerate(starts))})
    times = Times(
        target_seconds,
        whole["call"]["call"] / sum(whole["call"][phase] for phase in PHASES),
        (0.0, 0.0),
        _between({width: drafted[width, 1] for width in widths}),
        _between(level),
        {name: _between(seconds) for name, seconds in selected.items()},
    )
    alone, drafts = (
        max(0.0, whole[index] - call_time(times, STARTED, method.tree, 1))
        for index, method in enumerate(started)
    )
    return times._replace(start=(alone, drafts))


def call_time(times: Times, name: str, tree: Tree, expected: float) -> float:
    """Returns the seconds of a call that emits `expected` tokens."""
    if not tree.size:
        return times.target(1)
    widths = [len(np.intersect1d(level, tree.inner)) for level in tree.levels[:-1]]
    # The first level is timed by its number of children, the others by their number of parents.
    drafting = times.first_level(len(tree.levels[1])) + sum(map(times.level, widths[1:]))
    select = expected * times.select[name](max(len(tree.levels[1]), widths[-1]))
    return times.in_call_factor * (drafting + times.target(tree.size + 1) + select)


def on_chains(name: str, width: int) -> Method | None:
    """Returns the method on `width` chains, for timing its selection."""
    return on_tree(name, tree_lib.iid_chains(width, 4))


def counted(size: int) -> list[int]:
    """Returns the numbers of tokens on which calls are timed, up to `size` nodes and the root."""
    return [*(count for count in (1, 2, 3, 5, 9, 17, 33, 65, 129) if count <= size), size + 1]


def _start_timer(
    method: Method, config: ml_collections.ConfigDict, target: Model, draft: Model
) -> Timer:
    """Returns a timer of generations of one new token per sequence."""
    models = freeze(target), freeze(draft)
    prompts = np.ones((config.batch_size, config.prompt_tokens + 1), np.int32)
    lengths = np.full(config.batch_size, prompts.shape[1])

    def one(seed: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(generate(jax.random.key(seed), method, *models, prompts, lengths, 1))
        return time.perf_counter() - started

    one(0)
    return lambda: float(np.median([one(seed) for seed in range(1, 12)]))


def _between(seconds: dict[int, float]) -> Callable[[int], float]:
    """Returns a function that interpolates between measured numbers, and is proportional beyond
    the last."""
    numbers, values = list(seconds), list(seconds.values())
    return lambda number: float(np.interp(number, numbers, values)) * max(1.0, number / numbers[-1])
