"""What a transport plan is: drafts from p in, one token of law q out.

A plan lives in a file of its own as three functions, and is registered in `spectr_jax.transport`. The ground floor:
nothing here knows a model or a tree.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Choice(NamedTuple):
    """The token that a plan chose.

    Attributes:
      token: [] int32, distributed as q.
      accepted: [] bool, whether it is one of the valid drafts (also when the residual law hit one by chance).
    """

    token: jax.Array
    accepted: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transport plan with its options bound. Equal plans hash alike, so that jit compiles each once.

    Attributes:
      name: as registered.
      options: sorted (name, value) pairs.
      functions: the plan's `select`, `law` and `acceptance`, before options.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    functions: tuple[Callable, Callable, Callable]

    def select(self, key: jax.Array, p: jax.Array, q: jax.Array, drafts: jax.Array, valid: jax.Array) -> Choice:
        """Chooses a token of law q.

        Jittable and vmappable; the number of drafts is the traced sum of `valid`. With none valid, the token is a plain
        draw from q. No token with q = 0 is ever chosen.

        Args:
          key: consumed.
          p: [V] law of each draft.
          q: [V] law of the token to emit.
          drafts: [k] int32 tokens.
          valid: [k] bool; the others are padding.
        """
        return self.functions[0](key, p, q, drafts, valid, **dict(self.options))

    def law(self, p: np.ndarray, q: np.ndarray, drafts: tuple[int, ...]) -> np.ndarray:
        """The exact law [V] of the token given the drafts, in float64; averaged over drafts it is q."""
        return self.functions[1](np.asarray(p, float), np.asarray(q, float), drafts, **dict(self.options))

    def acceptance(self, p: np.ndarray, q: np.ndarray, k: int) -> float:
        """The exact probability that the token is among k i.i.d. drafts, in float64."""
        return float(self.functions[2](np.asarray(p, float), np.asarray(q, float), k, **dict(self.options)))


def draw(key: jax.Array, weights: jax.Array, shape: tuple[int, ...] = ()) -> jax.Array:
    """Draws tokens with probability proportional to `weights` [V] by inverting their cumulative sum; consumes `key`.

    One uniform a token, where the Gumbel trick needs V. The sum is inverted in two stages, a block of tokens and a token
    in it, so that nothing of size V is scanned. No token of weight 0 is drawn, whatever the rounding.
    """
    V = weights.shape[-1]
    width = math.isqrt(V - 1) + 1
    blocks = jnp.pad(weights, (0, -V % width)).reshape(-1, width)
    sums = jnp.sum(blocks, axis=1)
    before = jnp.concatenate([jnp.zeros(1, weights.dtype), jnp.cumsum(sums)])

    def draw_one(uniform):
        level = uniform * before[-1]
        block = _invert(before[1:], sums, level)
        token = _invert(jnp.cumsum(blocks[block]), blocks[block], level - before[block])
        return (block * width + token).astype(jnp.int32)

    uniforms = jax.random.uniform(key, shape, weights.dtype)
    return jax.vmap(draw_one)(uniforms.reshape(-1)).reshape(shape)


def _invert(cumulative: jax.Array, weights: jax.Array, level: jax.Array) -> jax.Array:
    """The first index of positive weight whose cumulative sum exceeds `level`; rounded past the end, the last such."""
    positive = weights > 0
    reached = positive & (cumulative > level)
    last = weights.shape[0] - 1 - jnp.argmax(positive[::-1])
    return jnp.where(jnp.any(reached), jnp.argmax(reached), last)


def or_else(weights: jax.Array, fallback: jax.Array) -> jax.Array:
    """`weights` [V] if any is positive, else `fallback`: the limit of a residual 0/0, reached only by rounding."""
    return jnp.where(jnp.any(weights > 0), weights, fallback)
