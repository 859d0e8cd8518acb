r"""Transport plans: from drafts with distribution p to one token with distribution q.

Given k drafts $x_1, \dots, x_k$ a plan emits y with probability $\pi(y \mid x_1, \dots, x_k)$
(`Plan.pmf`). It is exact if y, averaged over the drafts, is distributed as q. Its acceptance is the
probability that y is among the drafts (`Plan.acceptance`), and higher is better:

$$\sum_{x_1, \dots, x_k} P(x_1, \dots, x_k) \ \pi(y \mid x_1, \dots, x_k) = q(y), \qquad
\alpha = P(y = x_i \text{ for some } i).$$

A plan is a file with three functions, registered in `spectr_jax.transport`. Nothing here knows a
model or a tree.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt
from numpy.typing import ArrayLike

from spectr_jax.transport import checks
from spectr_jax.transport.types import (
    BoolScalar,
    Drafts,
    ExactProbs,
    FloatScalar,
    IntScalar,
    Probs,
    Valid,
)
from spectr_jax.utils.errors import UserError


class Choice(NamedTuple):
    """The token that a plan chose.

    Attributes:
      token: [] int32, distributed as q.
      accepted: [] bool, whether it is one of the valid drafts (also when a draw from the residual
        hits one by chance).
    """

    token: IntScalar
    accepted: BoolScalar


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transport plan with its options bound. Equal plans hash alike, so that jit compiles each
    once.

    Attributes:
      name: as registered.
      options: sorted (name, value) pairs.
      functions: the plan's `select`, `pmf` and `acceptance`, before options.
      drafts: how the k drafts must be drawn from p: "iid"; "without_replacement"; "race", the same
        with a key that `select` must be given too; or "greedy" (the k - 1 likeliest tokens and one
        draw from the rest).
      winner: `winner(key, p, q, drafts, valid)`, the plan's `win` (`transport/winner.py`); None if
        it names no winner.
    """

    name: str
    options: tuple[tuple[str, Any], ...]
    functions: tuple[Callable[..., Choice], Callable[..., ExactProbs], Callable[..., float]]
    drafts: str = "iid"
    winner: Callable[..., Any] | None = None

    def select(
        self, key: PRNGKeyArray, p: ArrayLike, q: ArrayLike, drafts: ArrayLike, valid: ArrayLike
    ) -> Choice:
        """Chooses a token with distribution q.

        Jittable and vmappable. The number of drafts is the sum of `valid`, which may be traced. A
        token with q = 0 is never chosen. Outside jit, bad arguments raise. Under jit their values
        are not known:

        - With no valid draft the token is drawn from q.
        - A draft with p = 0 or outside the vocabulary is not valid.
        - Negative and NaN entries of p and q count as 0, and the rest is scaled to sum to 1.
        - If q has no positive entry, or an infinite one, the token is -1.

        Args:
          key: consumed.
          p: [V] distribution of each draft.
          q: [V] distribution of the token to emit.
          drafts: [k] int32 tokens.
          valid: [k] bool; the others are padding.

        Raises:
          UserError: outside jit, p or q is not a distribution, or the drafts cannot come from p.
        """
        checks.check_whole(drafts)
        p, q, drafts, valid = (jnp.asarray(x, dtype) for x, dtype in _dtypes(p, q, drafts, valid))
        if checks.known(p, q, drafts, valid):
            exact, _ = checks.check_distributions(p, q)
            checks.check_drafts(exact, np.asarray(drafts)[np.asarray(valid)], self.drafts)
        p, q, valid = _usable(p, q, drafts, valid)
        choice = self.functions[0](key, p, q, drafts, valid, **dict(self.options))
        possible = jnp.any(q > 0)
        return Choice(jnp.where(possible, choice.token, -1), choice.accepted & possible)

    def win(self, key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Any:
        """Returns the winner among the drafts and its distribution, a `transport.winner.Winner`.

        The arguments are those of `select` under jit.

        Raises:
          UserError: the plan names no winner.
        """
        if self.winner is None:
            raise UserError(
                f"plan {self.name!r} names no winner; give one that does, such as 'otm'"
            )
        p, q, valid = _usable(p, q, drafts, valid)
        return self.winner(key, p, q, drafts, valid, **dict(self.options))

    def pmf(self, p: ArrayLike, q: ArrayLike, drafts: Sequence[int]) -> ExactProbs:
        """Returns the exact distribution [V] of the token given the drafts, in float64; averaged
        over drafts it is q.

        Raises:
          UserError: p or q is not a distribution, the drafts cannot come from p, or the problem is too
            large for the plan.
        """
        p, q = checks.check_distributions(p, q)
        return self.functions[1](
            p, q, checks.check_drafts(p, drafts, self.drafts), **dict(self.options)
        )

    def acceptance(self, p: ArrayLike, q: ArrayLike, k: int | float) -> float:
        """Returns the exact probability that the token is among k drafts, in float64.

        Raises:
          UserError: p or q is not a distribution, k < 1, or the problem is too large for the plan.
        """
        p, q = checks.check_distributions(p, q)
        return float(self.functions[2](p, q, checks.check_number(k), **dict(self.options)))


def _dtypes(
    p: ArrayLike, q: ArrayLike, drafts: ArrayLike, valid: ArrayLike
) -> tuple[tuple[ArrayLike, Any], ...]:
    return (p, jnp.float32), (q, jnp.float32), (drafts, jnp.int32), (valid, bool)


def _usable(p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> tuple[Probs, Probs, Valid]:
    """Returns the arguments of `Plan.select` under jit, made valid."""
    p, q = _normalised(p), _normalised(q)
    return (
        p,
        q,
        valid & (p.at[drafts].get(mode="fill", fill_value=0, wrap_negative_indices=False) > 0),
    )


def _normalised(pmf: Probs) -> Probs:
    positive = jnp.where(pmf > 0, pmf, 0)
    total = jnp.sum(positive)
    return positive / jnp.where(total > 0, total, 1)


def select_by_pmf(
    pmf: Callable[..., ExactProbs],
    key: PRNGKeyArray,
    p: Probs,
    q: Probs,
    drafts: Drafts,
    valid: Valid,
) -> Choice:
    """Draws a token from `pmf(p, q, drafts)`, which the host computes; consumes `key`.

    This is the `select` of plans for analysis, for small vocabularies and tests: each choice is a
    callback to the host.
    """

    def on_host(
        p: ArrayLike, q: ArrayLike, drafts: ArrayLike, valid: ArrayLike
    ) -> Float[np.ndarray, " vocab"]:
        p, q, drafts, valid = (np.asarray(x) for x in (p, q, drafts, valid))
        p, q = p.astype(np.float64), q.astype(np.float64)
        if not (valid.any() and q.any()):
            return q.astype(np.float32)
        return pmf(p / p.sum(), q / q.sum(), tuple(drafts[valid].tolist())).astype(np.float32)

    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    weights = jax.pure_callback(on_host, shape, p, q, drafts, valid, vmap_method="sequential")
    token = draw(key, or_else(jnp.where(q > 0, weights, 0), q))
    return Choice(token, jnp.any(valid & (drafts == token)))


def draw(key: PRNGKeyArray, weights: Probs, shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
    """Draws tokens with probability proportional to `weights` [V] by inverting their cumulative
    sum; consumes `key`.

    It takes one uniform per token, where the Gumbel trick needs V. The sum is inverted in two
    stages, for a block of tokens and for a token in it, so that nothing of size V is scanned. A
    token of weight 0 is never drawn, whatever the rounding, unless all are 0: then it is the last.

    A float32 uniform has 2^23 values, too few for tens of thousands of rare tokens: it chooses the
    block, to 1e-7 of the mass, and the nine bits that are left of its 32 refine the place in it.
    """
    V = weights.shape[-1]
    width = math.isqrt(V - 1) + 1
    blocks = jnp.pad(weights, (0, -V % width)).reshape(-1, width)
    sums = jnp.sum(blocks, axis=1)
    before = jnp.concatenate([jnp.zeros(1, weights.dtype), jnp.cumsum(sums)])

    def draw_one(bits: UInt[Array, ""]) -> IntScalar:
        level, refined = (bits >> 9) * before[-1] * 2.0**-23, (bits & 511) * before[-1] * 2.0**-32
        block = _invert(before[1:], sums, level)
        token = _invert(jnp.cumsum(blocks[block]), blocks[block], level - before[block] + refined)
        return jnp.minimum(block * width + token, V - 1).astype(jnp.int32)

    bits = jax.random.bits(key, shape, jnp.uint32)
    return jax.vmap(draw_one)(bits.reshape(-1)).reshape(shape)


def _invert(
    cumulative: Float[Array, " n"], weights: Float[Array, " n"], level: FloatScalar
) -> IntScalar:
    """Returns the first index of positive weight whose cumulative sum exceeds `level`, or the last
    such index."""
    positive = weights > 0
    reached = positive & (cumulative > level)
    last = weights.shape[0] - 1 - jnp.argmax(positive[::-1])
    return jnp.where(jnp.any(reached), jnp.argmax(reached), last)


def product(a: Float[Array, "..."], b: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns `a @ b` in full float32.

    By default TPUs and GPUs round the factors to 8 or 11 bits, too few for an exact distribution.
    """
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def or_else(weights: Probs, fallback: Probs) -> Probs:
    """Returns `weights` [V] if any is positive, else `fallback`, the limit of a residual 0/0 that
    only rounding reaches."""
    return jnp.where(jnp.any(weights > 0), weights, fallback)
