"""How long model calls, and the phases of a call of a method, take on this machine.

A timer is compiled when it is made, so that many can be made side by side (`timed`), and measures when it is called.
All but `call_runs` time loops that run on the device, as in decoding: no Python runs between two calls, and caches are
updated in place.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from spectr_jax.experiments.measure.compilation import side_by_side
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache
from spectr_jax.models.frozen import Frozen, freeze

PASSES = 8
"""Passes of a loop on the device, per measurement."""
PHASES = ("draft", "score", "select", "commit")
"""The phases of a call, by their `jax.named_scope` in `decoding.generate`."""

Timer = Callable[[], float]
"""Measures, and returns the median seconds of one pass."""


def timed(label: str, tasks: Mapping[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Makes the timers of all tasks side by side, then runs them one after the other.

    Args:
      label: for the progress bars.
      tasks: by any name, functions that return a timer, or a pytree of them.

    Returns:
      Seconds in place of the timers.
    """
    return dict(zip(tasks, _one_by_one(label, list(tasks.values())), strict=True))


def timed_once(
    journal: Journal, label: str, tasks: Mapping[Any, Callable[[], Any]]
) -> dict[Any, Any]:
    """As `timed`, with each task kept in the journal once measured; tasks found there are not run."""
    names = {task: f"{label} {task}" for task in tasks}
    found = _one_by_one(label, [make for task, make in tasks.items() if names[task] not in journal])
    return {
        task: journal.value(name, functools.partial(next, found)) for task, name in names.items()
    }


def _one_by_one(label: str, tasks: list[Callable[[], Any]]) -> Iterator[Any]:
    """The seconds of each task, in order; the first comes when all are made."""
    bar = functools.partial(tqdm.tqdm, total=len(tasks), dynamic_ncols=True)
    made = list(bar(side_by_side(tasks), f"{label}, compiling"))
    for timers in bar(made, label):
        yield jax.tree.map(lambda timer: timer(), timers)


def call_seconds(
    model: Model, batch: int, tokens: Sequence[int], context: int = 64, repeats: int = 10
) -> Callable[[int], float]:
    """Measures calls on each number of new tokens per sequence, after `context` committed random tokens.

    Args:
      model: an `nnx.Module` that follows `Model`.
      batch: sequences in a call.
      tokens: ascending numbers of new tokens to measure.
      context: committed tokens of each text.
      repeats: measurements, of `PASSES` calls each, after one that compiles.

    Returns:
      A function of the number of tokens: the median seconds, between measured numbers by interpolation.
    """
    frozen = freeze(model)

    def one(_, fixed, carry):
        model, new = fixed
        return _extend(model.merge(), new, carry[1])

    def timer(count: int) -> Timer:
        new, cache = _random_call(model, batch, count, context)
        logits = jnp.zeros((batch, count, model.vocab_size))
        return _loop_timer(one, [(frozen, new)], (logits, cache), repeats)

    seconds = timed("calls", {count: functools.partial(timer, count) for count in tokens})
    return lambda number: float(np.interp(number, tokens, list(seconds.values())))


def call_runs(model: Model, batch: int, count: int, context: int) -> Callable[[], float]:
    """Returns a function that makes one call on `count` new tokens from Python, and returns its seconds; the first has
    compiled."""
    frozen = freeze(model)
    run = jax.jit(lambda frozen, new, cache: _extend(frozen.merge(), new, cache), donate_argnums=2)
    new, cache = _random_call(model, batch, count, context)

    def timed() -> float:
        nonlocal cache
        started = time.perf_counter()
        _, cache = jax.block_until_ready(run(frozen, new, cache))
        return time.perf_counter() - started

    timed()
    return timed


def phase_timers(
    method: Method,
    target: Model,
    draft: Model,
    batch: int,
    context: int = 64,
    repeats: int = 10,
    phases: Sequence[str] = (*PHASES, "call"),
) -> dict[str, Timer]:
    """Timers of the phases of one call of `method` (draft, score, select and commit, each alone), and of the whole call.

    Args:
      method: one that drafts, with a model of its own.
      target: an `nnx.Module` that follows `Model`.
      draft: likewise.
      batch: texts.
      context: committed tokens of each text, random ones.
      repeats: measurements, of `PASSES` passes each, at temperature 1.
      phases: which are wanted.
    """
    models = freeze(target), freeze(draft)
    tree, room = method.tree, method.tree.height + 1
    lengths = jnp.full(batch, context, jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    prompts = jnp.asarray(
        np.random.default_rng(0).integers(0, target.vocab_size, (batch, context)), jnp.int32
    )
    start = jax.jit(
        lambda models: prefill(method, models[0].merge(), models[1].merge(), prompts, lengths, room)
    )(models)

    def whole_call(models, loop):
        return call(
            loop, method, models[0].merge(), models[1].merge(), keys, lengths + room, Policy()
        )

    def call_phase(_, models, loop):
        after, _ = whole_call(models, loop)
        return start._replace(
            step=after.step,
            target_cache=_at(after.target_cache, start.target_cache.lengths),
            draft_cache=_at(after.draft_cache, start.draft_cache.lengths),
        )

    @jax.jit
    def sample(models, step):
        _, seen = whole_call(models, start._replace(step=step))
        return seen.scored.tokens, seen.scored.p, seen.scored.logits, seen.chosen

    if set(phases) == {"draft"}:  # It needs a call's shapes alone.
        samples = [jax.tree.map(jnp.zeros_like, jax.eval_shape(sample, models, 0))]
    else:
        samples = [sample(models, step) for step in np.arange(4)]
    tokens, p, logits, chosen = samples[0]
    caches = start.target_cache, start.draft_cache
    drafted = drafting.Drafts(tokens, p, caches[1])
    measured: dict[str, tuple[Callable, list[Any], Any]] = {
        "draft": (
            _draft_phase(method, keys, start.tokens, lengths),
            [(models[1], start.features)],
            drafted,
        ),
        "score": (
            _score_phase(tree, lengths),
            [(models[0], each[0]) for each in samples],
            (logits, caches[0]),
        ),
        "select": (_select_phase(method, keys, lengths), [each[:3] for each in samples], chosen),
        "commit": (_commit_phase(tree, models[1], lengths), [each[3] for each in samples], caches),
        "call": (call_phase, [models], start),
    }
    return {name: _loop_timer(*measured[name], repeats) for name in phases}


def token_timer(method: Method, vocab_size: int, batch: int, repeats: int = 10) -> Timer:
    """Returns a timer of the walk, in seconds per emitted token, over `batch` sequences at once, on distributions that
    accept most drafts.

    Args:
      method: whose walk is timed, on its tree; no model takes part.
      vocab_size: V.
      batch: texts.
      repeats: measurements, of `PASSES` walks each.
    """
    rng, tree = np.random.default_rng(0), method.tree
    logits = jnp.asarray(
        rng.normal(size=(batch, 1, vocab_size))
        + 0.1 * rng.normal(size=(batch, tree.size + 1, vocab_size))
    )
    logits = logits.astype(jnp.float32)
    p = jax.nn.softmax(logits[:, tree.inner])
    tokens = jnp.asarray(rng.integers(0, vocab_size, (batch, tree.size + 1)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    lengths = jnp.ones(batch, jnp.int32)

    walk, fixed = jax.jit(_select_phase(method, keys, lengths)), (tokens, p, logits)
    chosen = [walk(step, fixed, None) for step in range(PASSES)]
    walks, emitted = (
        _loop_timer(walk, [fixed], chosen[0], repeats),
        float(np.mean([each.emitted for each in chosen])),
    )
    return lambda: walks() / emitted


def _draft_phase(method: Method, keys_B, text_BxT, lengths_B) -> Callable:
    def phase(step, fixed, drafts):
        (model, seen), cache = fixed, drafts.cache
        arguments = (
            model.merge(),
            drafting.RULES[method.verifier.rule],
            method.tree,
            Policy(),
            text_BxT,
            lengths_B,
            cache,
            seen,
        )
        drafts = drafting.draft(_fold(keys_B, step), *arguments)
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
        policy = for_rows(Policy(), len(lengths_B))
        scored = ScoredTree(
            tree=method.tree, policy=policy, length=lengths_B, tokens=tokens, p=p, logits=logits
        )
        return for_each_sequence(
            method.verifier, jnp.zeros(len(lengths_B), bool), _fold(keys_B, step), scored
        )

    return phase


def _commit_phase(tree: Tree, draft: Frozen, lengths_B) -> Callable:
    def phase(_, chosen, caches):
        target_cache, draft_cache = caches
        after = lengths_B + chosen.emitted
        return (
            _at(scoring.commit(target_cache, tree, chosen.path, after), target_cache.lengths),
            _at(
                drafting.commit(draft, draft_cache, tree, chosen.path, lengths_B, after),
                draft_cache.lengths,
            ),
        )

    return phase


def _fold(keys_B, step) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, step)


def _random_call(model: Model, batch: int, count: int, context: int) -> tuple[jax.Array, Cache]:
    """New tokens [batch, count], and a cache with `context` committed ones."""
    new = np.random.default_rng(0).integers(0, model.vocab_size, (batch, count))
    cache = model.init_cache(batch, context + count)
    return jnp.asarray(new, jnp.int32), _at(cache, jnp.full(batch, context, jnp.int32))


def _extend(model: Model, new: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    """Returns logits of one call on a chain of new tokens, and the cache with them pending."""
    batch, count = new.shape
    positions = cache.lengths[:, None] + jnp.arange(count)
    visible = jnp.broadcast_to(np.tri(count, dtype=bool), (batch, count, count))
    return model.extend(new, positions, visible, cache)


def _at(cache: Cache, lengths: jax.Array) -> Cache:
    return dataclasses.replace(cache, lengths=lengths)


def _loop_timer(body: Callable, fixed: list[Any], start: Any, repeats: int) -> Timer:
    """Returns a timer of `carry = body(step, fixed[i], carry)` in a loop on the device; the first loop is not counted."""

    def one_pass(step, fixed, carry):
        return body(
            step, *jax.lax.optimization_barrier((fixed, carry))
        )  # Else what does not change leaves the loop.

    @functools.partial(jax.jit, donate_argnums=1)
    def run(fixed, carry):
        return jax.lax.fori_loop(0, PASSES, lambda step, carry: one_pass(step, fixed, carry), carry)

    program = run.lower(fixed[0], start).compile()

    def timer() -> float:
        carry, seconds = jax.tree.map(jnp.copy, start), []
        for repeat in range(repeats + 1):
            started = time.perf_counter()
            carry = jax.block_until_ready(program(fixed[repeat % len(fixed)], carry))
            seconds.append(time.perf_counter() - started)
        return float(np.median(seconds[1:])) / PASSES

    return timer
