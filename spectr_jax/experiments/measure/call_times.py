"""Times of model calls and of the phases of a method's call on this machine.

A timer compiles when it is made, so that many compile in parallel (`timed`), and measures when it
is called. All but `call_runs` time loops on the device, as in decoding: no Python runs between two
calls, and caches are updated in place.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from spectr_jax.decoding import Method, Policy, loop
from spectr_jax.decoding.drafters import Sequences, Setup
from spectr_jax.decoding.policy import for_rows
from spectr_jax.decoding.request import request_of
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.verifiers.base import for_each_row
from spectr_jax.experiments.measure.bench import compiled_in_parallel
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache
from spectr_jax.models.frozen import freeze

PASSES = 8
"""Passes of the device loop per measurement."""
REPEATS = 10
"""Measurements of a timer, after a warm-up."""
PHASES = ("draft", "score", "select", "commit")
"""The phases of a call, named as their `jax.named_scope` in `decoding.loop`."""

Timer = Callable[[], float]
"""A function that measures, and returns the median seconds of one pass."""


def timed(journal: Journal, label: str, tasks: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Returns the seconds of all tasks. The journal stores them, and only missing ones run.

    The missing tasks compile in parallel; then they are measured one at a time.

    Args:
      journal: the journal of the table.
      label: title of the progress bars, and prefix of the names in the journal.
      tasks: by any name, functions that return a timer or a pytree of timers.

    Returns:
      `tasks`, with the measured seconds instead of the timers.
    """
    names = {task: f"{label} {task}" for task in tasks}
    missing = [make for task, make in tasks.items() if names[task] not in journal]
    bar = functools.partial(tqdm.tqdm, total=len(missing), dynamic_ncols=True)
    made = iter(bar(list(bar(compiled_in_parallel(missing), f"{label}, compiling")), label))

    def seconds() -> Any:
        return jax.tree.map(lambda timer: timer(), next(made))

    return {task: journal.get_or_measure(name, seconds) for task, name in names.items()}


def call_timer(model: Model, batch: int, count: int, context: int) -> Timer:
    """Returns a timer of a call on `count` new tokens of each of `batch` sequences, after `context`
    committed random tokens. `model` is as for `freeze`."""

    def one(_, fixed, carry):
        frozen, new = fixed
        return _extend(frozen.merge(), new, carry[1])

    new, cache = _random_call(model, batch, count, context)
    logits = jnp.zeros((batch, count, model.vocab_size))
    return _loop_timer(one, [(freeze(model), new)], (logits, cache))


def call_runs(model: Model, batch: int, count: int, context: int) -> Callable[[], float]:
    """Returns a function that makes the call of `call_timer` once, from Python, and returns its
    seconds. The call is already compiled."""
    frozen = freeze(model)
    run = jax.jit(lambda frozen, new, cache: _extend(frozen.merge(), new, cache), donate_argnums=2)
    new, cache = _random_call(model, batch, count, context)

    def one() -> float:
        nonlocal cache
        started = time.perf_counter()
        _, cache = jax.block_until_ready(run(frozen, new, cache))
        return time.perf_counter() - started

    one()
    return one


def phase_timers(
    method: Method, target: Model, draft: Model, batch: int, context: int
) -> dict[str, Timer]:
    """Returns timers, at temperature 1, of each phase of a call alone and of the whole call.

    Args:
      method: a method with a draft model.
      target, draft: as for `freeze`.
      batch: number of sequences.
      context: committed random tokens per sequence.
    """
    models, room = (freeze(target), freeze(draft)), method.tree.height + 1
    lengths = jnp.full(batch, context, jnp.int32)
    prompts = Sequences(tokens=_random_tokens(target, batch, context), lengths=lengths)
    keys = jax.random.split(jax.random.key(0), batch)

    def setup(models) -> Setup:
        return request_of(keys, method, models[0], models[1], prompts, room, room).setup()

    start = jax.jit(lambda models: loop.begin(setup(models), prompts, room))(models)

    @jax.jit
    def sample(models, step):
        drafts = loop.draft(start, setup(models), _fold(keys, step))
        on_tree = drafts, method.tree, start.target_cache
        return drafts, loop.score_and_select(start, setup(models), keys, *on_tree)

    samples = [sample(models, step) for step in np.arange(4)]
    loops = _phase_loops(method, models, setup, start, samples)
    return {name: _loop_timer(*arguments) for name, arguments in loops.items()}


def _phase_loops(
    method: Method, models: Any, setup: Callable, start: loop.Loop, samples: list[Any]
) -> dict[str, tuple[Callable, list[Any], Any]]:
    """Returns the arguments of `_loop_timer` for each phase, and for the whole call.

    `setup` is a function of the models, and `samples` has the drafts and outputs of some calls.
    """
    caches, lengths = (start.target_cache, start.drafter_state), start.sequences.lengths
    keys = jax.random.split(jax.random.key(0), len(lengths))

    def with_caches(caches) -> loop.Loop:
        return start._replace(target_cache=caches[0], drafter_state=caches[1])

    def call_phase(_, models, before):
        after, _ = loop.call(before, setup(models))
        after_caches = _at((after.target_cache, after.drafter_state), caches)
        return with_caches(after_caches)._replace(calls=after.calls)

    def draft_phase(step, models, drafts):
        before = with_caches((drafts.target_cache, drafts.state))
        drafts = loop.draft(before, setup(models), _fold(keys, step))
        target_cache, state = _at((drafts.target_cache, drafts.state), caches)
        return drafts._replace(target_cache=target_cache, state=state)

    def score_phase(_, fixed, carry):
        models, tokens = fixed
        logits, _, cache = loop.score(models[0].merge(), method.tree, tokens, lengths, carry[1])
        return logits, _at(cache, start.target_cache)

    def commit_phase(_, fixed, carry):
        models, drafts, selected = fixed
        drafts = drafts._replace(state=carry[1])
        after = loop.commit(start, setup(models), drafts, selected._replace(cache=carry[0]))
        return _at((after.target_cache, after.drafter_state), caches)

    drafts, selected = samples[0]
    of_score = [(models, drafts.tokens) for drafts, _ in samples]
    of_select = [(drafts.tokens, drafts.p, selected.logits) for drafts, selected in samples]
    of_commit = [
        (models, drafts._replace(state=None, target_cache=None), selected._replace(cache=None))
        for drafts, selected in samples
    ]
    return {
        "draft": (draft_phase, [models], drafts),
        "score": (score_phase, of_score, (selected.logits, caches[0])),
        "select": (_select_phase(method, keys, lengths), of_select, selected.chosen),
        "commit": (commit_phase, of_commit, caches),
        "call": (call_phase, [models], start),
    }


def _select_phase(method: Method, keys_B, lengths_B) -> Callable:
    def phase(step, fixed, _):
        tokens, p, logits = fixed
        batch = len(lengths_B)
        shaping, done = for_rows(Policy(), batch).shaping, jnp.zeros(batch, bool)
        scored = ScoredTree(
            tree=method.tree, shaping=shaping, length=lengths_B, tokens=tokens, p=p, logits=logits
        )
        return for_each_row(scored, ~done, method.verifier, _fold(keys_B, step), scored)

    return phase


def _fold(keys_B, step) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, step)


def _random_call(model: Model, batch: int, count: int, context: int) -> tuple[jax.Array, Cache]:
    """Returns new tokens [batch, count], and a cache with `context` committed ones."""
    cache = model.init_cache(batch, context + count)
    lengths = jnp.full(batch, context, jnp.int32)
    return _random_tokens(model, batch, count), dataclasses.replace(cache, lengths=lengths)


def _random_tokens(model: Model, batch: int, count: int) -> jax.Array:
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (batch, count))
    return jnp.asarray(tokens, jnp.int32)


def _extend(model: Model, new: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Returns the logits of a call on a chain of new tokens, and the cache with them pending."""
    batch, count = new.shape
    positions = cache.lengths[:, None] + jnp.arange(count)
    visible = jnp.broadcast_to(np.tri(count, dtype=bool), (batch, count, count))
    return model.extend(new, positions, visible, cache)


def _at(caches: Any, first: Any) -> Any:
    """Returns `caches`, a pytree with caches, with the lengths of those of `first`."""

    def back(cache, old):
        return Cache(cache.rows, old.lengths) if isinstance(old, Cache) else cache

    return jax.tree.map(back, caches, first, is_leaf=lambda node: isinstance(node, Cache))


def _loop_timer(body: Callable, fixed: list[Any], start: Any) -> Timer:
    """Returns a timer of `carry = body(step, fixed[i], carry)` in a loop on the device."""

    def one_pass(step, fixed, carry):
        # Without the barrier XLA hoists loop-invariant work out of the loop.
        return body(step, *jax.lax.optimization_barrier((fixed, carry)))

    @functools.partial(jax.jit, donate_argnums=1)
    def run(fixed, carry):
        return jax.lax.fori_loop(0, PASSES, lambda step, carry: one_pass(step, fixed, carry), carry)

    program = run.lower(fixed[0], start).compile()

    def timer() -> float:
        carry, seconds = jax.tree.map(jnp.copy, start), []
        for repeat in range(REPEATS + 1):
            started = time.perf_counter()
            carry = jax.block_until_ready(program(fixed[repeat % len(fixed)], carry))
            seconds.append(time.perf_counter() - started)
        return float(np.median(seconds[1:])) / PASSES

    return timer
