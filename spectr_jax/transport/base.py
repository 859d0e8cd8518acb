"""What a transport plan is: drafts from p in, one token of law q out.

A plan lives in a file of its own as three functions, and is registered in `spectr_jax.transport`. The ground floor:
nothing here knows a model or a tree.
"""

import dataclasses
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

    One uniform a token, where the Gumbel trick needs V. No token of weight 0 is drawn, whatever the rounding.
    """
    cumulative = jnp.cumsum(weights)
    level = jax.random.uniform(key, shape, weights.dtype) * cumulative[-1]
    token = jnp.searchsorted(cumulative, level, side="right").clip(0, weights.shape[-1] - 1).astype(jnp.int32)
    # A parallel sum may round up between two tokens of weight 0, or the level up to the total.
    return jnp.where(weights[token] > 0, token, jnp.argmax(weights).astype(jnp.int32))


def or_else(weights: jax.Array, fallback: jax.Array) -> jax.Array:
    """`weights` [V] if any is positive, else `fallback`: the limit of a residual 0/0, reached only by rounding."""
    return jnp.where(jnp.any(weights > 0), weights, fallback)
