"""How long model calls take on this machine."""

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache


def call_seconds(
    model: Model, batch: int, tokens: Sequence[int], context: int = 64, repeats: int = 20
) -> Callable[[int], float]:
    """Measures calls on so many new tokens a text behind a cache of `context` tokens, with random tokens.

    Args:
      model: an `nnx.Module` that follows `Model`.
      batch: texts in a call.
      tokens: ascending numbers of new tokens to measure.
      context: committed tokens of each text.
      repeats: calls of each kind, after one that compiles.

    Returns:
      A function of the number of tokens: the median seconds, between measured numbers by interpolation.
    """
    graphdef, state = nnx.split(model)

    @jax.jit
    def call(state, new, cache):
        count = new.shape[1]
        positions = jnp.broadcast_to(context + jnp.arange(count), new.shape)
        visible = jnp.broadcast_to(np.tri(count, dtype=bool), (batch, count, count))
        return nnx.merge(graphdef, state).extend(new, positions, visible, cache)[0]

    medians = []
    for count in tokens:
        cache = model.init_cache(batch, context + count)
        cache = Cache(cache.rows, jnp.full(batch, context, jnp.int32))
        new = jnp.asarray(np.random.default_rng(0).integers(0, model.vocab_size, (batch, count)), jnp.int32)
        jax.block_until_ready(call(state, new, cache))
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            jax.block_until_ready(call(state, new, cache))
            seconds.append(time.perf_counter() - started)
        medians.append(float(np.median(seconds)))
    return lambda number: float(np.interp(number, tokens, medians))
