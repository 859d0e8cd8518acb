"""How long model calls, and the phases of a call of a method, take on this machine.

All but `call_runs` time loops that run on the device, as in decoding: no Python is between two calls, and caches are
updated in place.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.decoding import Method, Policy, drafting, scoring, selection
from spectr_jax.decoding.generate import call, prefill
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache

PASSES = 8
"""Of a loop on the device, for one measurement."""
PHASES = ("draft", "score", "select", "commit")
"""Of a call of a method, by their `jax.named_scope` in `decoding.generate`."""


def call_seconds(
    model: Model, batch: int, tokens: Sequence[int], context: int = 64, repeats: int = 10
) -> Callable[[int], float]:
    """Measures calls on so many new tokens a text behind a cache of `context` tokens, with random tokens.

    Args:
      model: an `nnx.Module` that follows `Model`.
      batch: texts in a call.
      tokens: ascending numbers of new tokens to measure.
      context: committed tokens of each text.
      repeats: measurements, of `PASSES` calls each, after one that compiles.

    Returns:
      A function of the number of tokens: the median seconds, between measured numbers by interpolation.
    """
    rebuild, leaves = _split(model)

    def one(_, fixed, carry):
        leaves, new = fixed
        logits, cache = _extend(rebuild(leaves), new, carry[1])
        return logits, cache

    medians = []
    for count in tokens:
        new, cache = _random_call(model, batch, count, context)
        logits = jnp.zeros((batch, count, model.vocab_size))
        medians.append(_loop_seconds(one, [(leaves, new)], (logits, cache), repeats))
    return lambda number: float(np.interp(number, tokens, medians))


def call_runs(model: Model, batch: int, count: int, context: int) -> Callable[[], float]:
    """A function that makes one call on `count` new tokens from Python, and returns its seconds; the first has compiled."""
    rebuild, leaves = _split(model)
    run = jax.jit(lambda leaves, new, cache: _extend(rebuild(leaves), new, cache), donate_argnums=2)
    new, cache = _random_call(model, batch, count, context)

    def timed() -> float:
        nonlocal cache
        started = time.perf_counter()
        _, cache = jax.block_until_ready(run(leaves, new, cache))
        return time.perf_counter() - started

    timed()
    return timed


def phase_seconds(
    method: Method,
    target: Model,
    draft: Model,
    batch: int,
    context: int = 64,
    repeats: int = 10,
    phases: Sequence[str] = (*PHASES, "call"),
) -> dict[str, float]:
    """Median seconds of the phases of one call of `method`, each alone: draft, score, select and commit; and of the whole.

    Args:
      method: one that drafts, with a model of its own.
      target: an `nnx.Module` that follows `Model`.
      draft: likewise.
      batch: texts.
      context: committed tokens of each text, random ones.
      repeats: measurements, of `PASSES` passes each, at temperature 1.
      phases: which are measured.
    """
    rebuild, leaves = _split((target, draft))
    tree, policy = method.tree, Policy()
    room = tree.height + 1
    lengths, limits = jnp.full(batch, context, jnp.int32), jnp.full(batch, context + room, jnp.int32)
    text_keys = jax.random.split(jax.random.key(0), batch)
    prompts = np.random.default_rng(0).integers(0, target.vocab_size, (batch, context)).astype(np.int32)
    start = jax.jit(lambda leaves: prefill(method, rebuild(leaves)[0], rebuild(leaves)[1], prompts, lengths, room))(leaves)

    def keys(step):
        return jax.vmap(jax.random.fold_in, in_axes=(0, None))(text_keys, step)

    def whole_call(leaves, loop):
        target, draft = rebuild(leaves)
        return call(loop, method, target, draft, text_keys, limits, policy)

    @jax.jit
    def sample(leaves, step):
        _, seen = whole_call(leaves, start._replace(step=step))
        return seen.tokens, seen.p, seen.logits, seen.chosen

    def draft_phase(step, fixed, carry):
        drafts = drafting.draft(keys(step), rebuild(fixed)[1], method.rule, tree, policy, start.text, lengths, carry.cache)
        return drafts._replace(cache=_at(drafts.cache, carry.cache.lengths))

    def score_phase(_, fixed, carry):
        leaves, tokens = fixed
        logits, cache = scoring.score(rebuild(leaves)[0], tree, tokens, lengths, carry[1])
        return logits, _at(cache, lengths - 1)

    def select_phase(step, fixed, _):
        walk = selection.for_each_text(method.walk, method.plan, tree, policy)
        return walk(jnp.zeros(batch, bool), keys(step), lengths, *fixed)

    def commit_phase(_, chosen, caches):
        target_cache, draft_cache = caches
        after = lengths + chosen.emitted
        return (
            _at(scoring.commit(target_cache, chosen.path, after), target_cache.lengths),
            _at(drafting.commit(draft_cache, tree, chosen.path, lengths, after), draft_cache.lengths),
        )

    def call_phase(_, fixed, loop):
        after, _ = whole_call(fixed, loop)
        return start._replace(
            step=after.step,
            target_cache=_at(after.target_cache, lengths - 1),
            draft_cache=_at(after.draft_cache, start.draft_cache.lengths),
        )

    samples = [sample(leaves, step) for step in np.arange(4)]
    tokens, p, logits, chosen = samples[0]
    caches = start.target_cache, start.draft_cache
    measured: dict[str, tuple[Callable, list[Any], Any]] = {
        "draft": (draft_phase, [leaves], drafting.Drafts(tokens, p, caches[1])),
        "score": (score_phase, [(leaves, each[0]) for each in samples], (logits, caches[0])),
        "select": (select_phase, [each[:3] for each in samples], chosen),
        "commit": (commit_phase, [each[3] for each in samples], caches),
        "call": (call_phase, [leaves], start),
    }
    return {name: _loop_seconds(*measured[name], repeats) for name in phases}


def token_seconds(method: Method, vocab_size: int, batch: int, repeats: int = 10) -> float:
    """Seconds that the walk takes for each token it emits, over `batch` texts at once, on laws that accept most drafts.

    Args:
      method: whose walk is timed, on its tree; no model takes part.
      vocab_size: V.
      batch: texts.
      repeats: measurements, of `PASSES` walks each.
    """
    rng, tree = np.random.default_rng(0), method.tree
    logits = jnp.asarray(rng.normal(size=(batch, 1, vocab_size)) + 0.1 * rng.normal(size=(batch, tree.size + 1, vocab_size)))
    logits = logits.astype(jnp.float32)
    p = jax.nn.softmax(logits[:, tree.inner])
    tokens = jnp.asarray(rng.integers(0, vocab_size, (batch, tree.size + 1)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    lengths = jnp.ones(batch, jnp.int32)

    def walk(step, fixed, _):
        step_keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, step)
        every = selection.for_each_text(method.walk, method.plan, tree, Policy())
        return every(jnp.zeros(batch, bool), step_keys, lengths, *fixed)

    fixed = tokens, p, logits
    once = jax.jit(walk, static_argnums=2)
    emitted = np.mean([once(step, fixed, None).emitted for step in range(PASSES)])
    return _loop_seconds(walk, [fixed], once(0, fixed, None), repeats) / float(emitted)


def _split(model: Any) -> tuple[Callable[[list], Any], list]:
    """How to build `model`, or a tuple of models, of arrays; and its arrays."""
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return lambda leaves: nnx.merge(graphdef, jax.tree.unflatten(structure, leaves)), leaves


def _random_call(model: Model, batch: int, count: int, context: int) -> tuple[jax.Array, Cache]:
    """New tokens [batch, count], and a cache with `context` committed ones."""
    new = np.random.default_rng(0).integers(0, model.vocab_size, (batch, count))
    cache = model.init_cache(batch, context + count)
    return jnp.asarray(new, jnp.int32), _at(cache, jnp.full(batch, context, jnp.int32))


def _extend(model: Model, new: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Logits of one call on a chain of new tokens, and the cache with them pending."""
    batch, count = new.shape
    positions = cache.lengths[:, None] + jnp.arange(count)
    visible = jnp.broadcast_to(np.tri(count, dtype=bool), (batch, count, count))
    return model.extend(new, positions, visible, cache)


def _at(cache: Cache, lengths: jax.Array) -> Cache:
    return dataclasses.replace(cache, lengths=lengths)


def _loop_seconds(body: Callable, fixed: list[Any], carry: Any, repeats: int) -> float:
    """Median seconds of a pass of `carry = body(step, fixed[i], carry)`, in loops on the device; the first has compiled."""

    def one_pass(step, fixed, carry):
        return body(step, *jax.lax.optimization_barrier((fixed, carry)))  # Else what does not change leaves the loop.

    @functools.partial(jax.jit, donate_argnums=1)
    def run(fixed, carry):
        return jax.lax.fori_loop(0, PASSES, lambda step, carry: one_pass(step, fixed, carry), carry)

    carry = jax.tree.map(jnp.copy, carry)
    seconds = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        carry = jax.block_until_ready(run(fixed[repeat % len(fixed)], carry))
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds[1:])) / PASSES
