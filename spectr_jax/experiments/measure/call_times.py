"""Times of model calls and of the phases of a method's call on this machine.

A timer compiles when it is made, so that many compile in parallel (`timed`), and measures when it
is called. All but `call_runs` time loops on the device, as in decoding: no Python runs between two
calls, and caches are updated in place.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from spectr_jax.decoding import Method, Policy, drafting, scoring
from spectr_jax.decoding.loop import call, prefill
from spectr_jax.decoding.policy import for_rows
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers.base import for_each_sequence
from spectr_jax.experiments.measure.bench import side_by_side
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache
from spectr_jax.models.frozen import Frozen, freeze

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
    made = iter(bar(list(bar(side_by_side(missing), f"{label}, compiling")), label))

    def seconds() -> Any:
        return jax.tree.map(lambda timer: timer(), next(made))

    return {task: journal.value(name, seconds) for task, name in names.items()}


def call_timer(model: Model, batch: int, count: int, context: int) -> Timer:
    """Returns a timer of a call on `count` new tokens of each of `batch` sequences, after `context`
    committed random tokens. `model` is an `nnx.Module`."""

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
    method: Method,
    target: Model,
    draft: Model,
    batch: int,
    context: int,
    phases: Sequence[str] = (*PHASES, "call"),
) -> dict[str, Timer]:
    """Returns timers, at temperature 1, of each phase of a call alone and of the whole call.

    Args:
      method: a method with a draft model.
      target, draft: `nnx.Module`s that follow `Model`.
      batch: number of sequences.
      context: committed random tokens per sequence.
      phases: names of the timers to make.
    """
    models = freeze(target), freeze(draft)
    tree, room = method.tree, method.tree.height + 1
    lengths = jnp.full(batch, context, jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    prompts = _random_tokens(target, batch, context)

    def merged(models) -> tuple[Any, Any]:
        return models[0].merge(), models[1].merge()

    start = jax.jit(lambda models: prefill(method, *merged(models), prompts, lengths, room))(models)

    def whole_call(models, loop):
        return call(loop, method, *merged(models), keys, lengths + room, Policy())

    def call_phase(_, models, loop):
        after, _ = whole_call(models, loop)
        target_cache = _at(after.target_cache, start.target_cache.lengths)
        draft_cache = _at(after.draft_cache, start.draft_cache.lengths)
        return start._replace(step=after.step, target_cache=target_cache, draft_cache=draft_cache)

    @jax.jit
    def sample(models, step):
        _, seen = whole_call(models, start._replace(step=step))
        return seen.scored.tokens, seen.scored.p, seen.scored.logits, seen.chosen

    if set(phases) == {"draft"}:  # Drafting needs only the shapes of a call.
        samples = [jax.tree.map(jnp.zeros_like, jax.eval_shape(sample, models, 0))]
    else:
        samples = [sample(models, step) for step in np.arange(4)]
    tokens, p, logits, chosen = samples[0]
    caches = start.target_cache, start.draft_cache
    drafts, draft_inputs = drafting.Drafts(tokens, p, caches[1]), [(models[1], start.features)]
    score_inputs = [(models[0], each[0]) for each in samples]
    select_inputs, commit_inputs = [each[:3] for each in samples], [each[3] for each in samples]
    loops: dict[str, tuple[Callable, list[Any], Any]] = {
        "draft": (_draft_phase(method, keys, start.tokens, lengths), draft_inputs, drafts),
        "score": (_score_phase(tree, lengths), score_inputs, (logits, caches[0])),
        "select": (_select_phase(method, keys, lengths), select_inputs, chosen),
        "commit": (_commit_phase(tree, models[1], lengths), commit_inputs, caches),
        "call": (call_phase, [models], start),
    }
    return {name: _loop_timer(*loops[name]) for name in phases}


def token_timer(method: Method, vocab_size: int, batch: int) -> Timer:
    """Returns a timer of the method's verifier alone, in seconds per emitted token.

    It runs without models on `batch` sequences, with random distributions that accept most drafts.
    """
    rng, tree = np.random.default_rng(0), method.tree
    shared = rng.normal(size=(batch, 1, vocab_size))
    logits = jnp.float32(shared + 0.1 * rng.normal(size=(batch, tree.size + 1, vocab_size)))
    p = jax.nn.softmax(logits[:, tree.inner])
    tokens = jnp.asarray(rng.integers(0, vocab_size, (batch, tree.size + 1)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    lengths = jnp.ones(batch, jnp.int32)

    select, fixed = jax.jit(_select_phase(method, keys, lengths)), (tokens, p, logits)
    chosen = [select(step, fixed, None) for step in range(PASSES)]
    timer = _loop_timer(select, [fixed], chosen[0])
    emitted = float(np.mean([each.emitted for each in chosen]))
    return lambda: timer() / emitted


def _draft_phase(method: Method, keys_B, tokens_BxT, lengths_B) -> Callable:
    def phase(step, fixed, drafts):
        (model, seen), cache = fixed, drafts.cache
        keys, rule = _fold(keys_B, step), method.verifier.rule
        assert rule is not None
        committed = tokens_BxT, lengths_B, cache, seen
        drafts = drafting.draft(keys, model.merge(), rule, method.tree, Policy(), *committed)
        return drafts._replace(cache=_at(drafts.cache, cache.lengths))

    return phase


def _score_phase(tree: Tree, lengths_B) -> Callable:
    def phase(_, fixed, scored):
        model, tokens = fixed
        logits, _, cache = scoring.score(model.merge(), tree, tokens, lengths_B, scored[1])
        return logits, _at(cache, scored[1].lengths)

    return phase


def _select_phase(method: Method, keys_B, lengths_B) -> Callable:
    def phase(step, fixed, _):
        tokens, p, logits = fixed
        policy, done = for_rows(Policy(), len(lengths_B)), jnp.zeros(len(lengths_B), bool)
        scored = ScoredTree(
            tree=method.tree, policy=policy, length=lengths_B, tokens=tokens, p=p, logits=logits
        )
        return for_each_sequence(method.verifier, done, _fold(keys_B, step), scored)

    return phase


def _commit_phase(tree: Tree, draft: Frozen, lengths_B) -> Callable:
    def phase(_, chosen, caches):
        target_cache, draft_cache = caches
        after, path = lengths_B + chosen.emitted, chosen.path
        target_after = scoring.commit(target_cache, tree, path, after)
        draft_after = drafting.commit(draft, draft_cache, tree, path, lengths_B, after)
        return _at(target_after, target_cache.lengths), _at(draft_after, draft_cache.lengths)

    return phase


def _fold(keys_B, step) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, step)


def _random_call(model: Model, batch: int, count: int, context: int) -> tuple[jax.Array, Cache]:
    """Returns new tokens [batch, count], and a cache with `context` committed ones."""
    cache = model.init_cache(batch, context + count)
    lengths = jnp.full(batch, context, jnp.int32)
    return _random_tokens(model, batch, count), _at(cache, lengths)


def _random_tokens(model: Model, batch: int, count: int) -> jax.Array:
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (batch, count))
    return jnp.asarray(tokens, jnp.int32)


def _extend(model: Model, new: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Returns the logits of a call on a chain of new tokens, and the cache with them pending."""
    batch, count = new.shape
    positions = cache.lengths[:, None] + jnp.arange(count)
    visible = jnp.broadcast_to(np.tri(count, dtype=bool), (batch, count, count))
    return model.extend(new, positions, visible, cache)


def _at(cache: Cache, lengths: jax.Array) -> Cache:
    return dataclasses.replace(cache, lengths=lengths)


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
