"""Random draws from weights, and exponential races."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt

from spectr_jax.transport.types import Key, Probs, Scalar


def draw(key: Key, weights: Probs, shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
    """Returns tokens of the given `shape`, drawn in proportion to `weights` [V]; consumes `key`.

    Inverts the cumulative sum in two stages, first for a block of tokens and then within it, so
    that nothing of size V is scanned. It needs one uniform per token; the Gumbel trick needs V. A
    token of weight 0 is never drawn, whatever the rounding. If all weights are 0, the last token is
    drawn.

    A float32 uniform has 2^23 values, too few for tens of thousands of rare tokens. So each draw
    uses 32 random bits: 23 choose the block, and nine refine the place within it.
    """
    V = weights.shape[-1]
    width = math.isqrt(V - 1) + 1
    blocks = jnp.pad(weights, (0, -V % width)).reshape(-1, width)
    sums = jnp.sum(blocks, axis=1)
    before = jnp.concatenate([jnp.zeros(1, weights.dtype), jnp.cumsum(sums)])

    def draw_one(bits: UInt[Array, ""]) -> Scalar:
        level, refined = (bits >> 9) * before[-1] * 2.0**-23, (bits & 511) * before[-1] * 2.0**-32
        block = _invert(before[1:], sums, level)
        token = _invert(jnp.cumsum(blocks[block]), blocks[block], level - before[block] + refined)
        return jnp.minimum(block * width + token, V - 1).astype(jnp.int32)

    bits = jax.random.bits(key, shape, jnp.uint32)
    return jax.vmap(draw_one)(bits.reshape(-1)).reshape(shape)


def _invert(cumulative: Float[Array, " n"], weights: Float[Array, " n"], level: Scalar) -> Scalar:
    """Returns the first index of positive weight whose cumulative sum exceeds `level`.

    If no sum does, returns the last index of positive weight.
    """
    positive = weights > 0
    reached = positive & (cumulative > level)
    last = weights.shape[0] - 1 - jnp.argmax(positive[::-1])
    return jnp.where(jnp.any(reached), jnp.argmax(reached), last)


def log_arrivals(key: Key, pmf: Probs) -> Probs:
    """Returns the logarithms of the arrival times [V] in the race of `pmf`; inf if never.

    `key` determines the clocks.
    """
    # Rare tokens win by tiny clocks. Default uniforms are multiples of 2^-24, too coarse for tokens
    # below 1e-7, which can hold 1e-3 of the mass.
    return -(jax.random.gumbel(key, pmf.shape, pmf.dtype, mode="high") + jnp.log(pmf))


def arrivals(key: Key, p: Probs, count: int) -> Int[Array, " {count}"]:
    """Returns the first `count` tokens in the race of p [V]; `select` must get the same `key`."""
    return jax.lax.top_k(-log_arrivals(key, p), count)[1].astype(jnp.int32)
