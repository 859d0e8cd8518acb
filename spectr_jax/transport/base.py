r"""The interface of transport plans, and what several plans share.

Given k drafts $x_1, \dots, x_k$ with distribution p, a plan emits y with probability
$\pi(y \mid x_1, \dots, x_k)$ (`Plan.pmf`). The plan is exact if y, averaged over the drafts, has
distribution q. Its acceptance is the probability that y is among the drafts (`Plan.acceptance`):

$$\sum_{x_1, \dots, x_k} P(x_1, \dots, x_k) \ \pi(y \mid x_1, \dots, x_k) = q(y), \qquad
\alpha = P(y = x_i \text{ for some } i).$$
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

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

T = TypeVar("T")


class Choice(NamedTuple):
    """The token that a plan chose.

    Attributes:
      token: [] int32, distributed as q.
      accepted: [] bool, whether the token is one of the valid drafts. A draw from the residual can
        equal a draft by chance; that counts.
    """

    token: IntScalar
    accepted: BoolScalar


@dataclasses.dataclass(frozen=True)
class Plan:
    """A transport plan with its options bound. Equal plans have equal hashes, so jit compiles once.

    Attributes:
      name: as registered.
      options: sorted (name, value) pairs.
      functions: the plan's `select`, `pmf` and `acceptance`, without options.
      drafts: the rule by which the k drafts are drawn from p: "iid"; "without_replacement"; "race",
        also without replacement, but with the key of `select`; or "greedy", the k - 1 likeliest
        tokens and one draw from the rest.
      winner: the plan's `win`, or None if the plan names no winner (`transport/winner.py`).
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

        Works under jit and vmap. The number of drafts is the sum of `valid`, which may be traced. A
        token with q = 0 is never chosen. Outside jit, bad arguments raise. Under jit:

        - Without a valid draft the token is drawn from q.
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
          UserError: outside jit, if p or q is not a distribution or the drafts cannot come from p.
        """
        checks.check_whole(drafts)
        p, q = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
        drafts, valid = jnp.asarray(drafts, jnp.int32), jnp.asarray(valid, bool)
        if not any(isinstance(each, jax.core.Tracer) for each in (p, q, drafts, valid)):
            exact, _ = checks.check_distributions(p, q)
            checks.check_drafts(exact, np.asarray(drafts)[np.asarray(valid)], self.drafts)
        p, q, valid = _usable(p, q, drafts, valid)
        choice = self.functions[0](key, p, q, drafts, valid, **dict(self.options))
        possible = jnp.any(q > 0)
        return Choice(jnp.where(possible, choice.token, -1), choice.accepted & possible)

    def win(self, key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Any:
        """Returns the `Winner` among the drafts (`transport/winner.py`); arguments as in `select`.

        Raises:
          UserError: the plan names no winner.
        """
        if self.winner is None:
            raise UserError(
                f"plan={self.name!r}: names no winner; give one that does, such as 'otm'"
            )
        p, q, valid = _usable(p, q, drafts, valid)
        return self.winner(key, p, q, drafts, valid, **dict(self.options))

    def pmf(self, p: ArrayLike, q: ArrayLike, drafts: Sequence[int]) -> ExactProbs:
        """Returns the exact distribution [V] of the token given the drafts, in float64.

        Raises:
          UserError: p or q is not a distribution, the drafts cannot come from p, or the problem is
            too large for the plan.
        """
        p, q = checks.check_distributions(p, q)
        drafts = checks.check_drafts(p, drafts, self.drafts)
        return self.functions[1](p, q, drafts, **dict(self.options))

    def acceptance(self, p: ArrayLike, q: ArrayLike, k: int | float) -> float:
        """Returns the exact probability that the token is among k drafts, in float64.

        Raises:
          UserError: p or q is not a distribution, k < 1, or the problem is too large for the plan.
        """
        p, q = checks.check_distributions(p, q)
        return float(self.functions[2](p, q, checks.check_number(k), **dict(self.options)))


def _usable(p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> tuple[Probs, Probs, Valid]:
    """Returns p, q and `valid`, repaired as `Plan.select` says."""
    p, q = _normalised(p), _normalised(q)
    drawn = p.at[drafts].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return p, q, valid & (drawn > 0)


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

    This is the `select` of plans for analysis. It calls back to the host for each choice, so it is
    for small vocabularies.
    """

    def on_host(*arrays: ArrayLike) -> Float[np.ndarray, " vocab"]:
        p, q, drafts, valid = (np.asarray(each) for each in arrays)
        p, q = p.astype(np.float64), q.astype(np.float64)
        if not (valid.any() and q.any()):
            return q.astype(np.float32)
        return pmf(p / p.sum(), q / q.sum(), tuple(drafts[valid].tolist())).astype(np.float32)

    shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
    weights = jax.pure_callback(on_host, shape, p, q, drafts, valid, vmap_method="sequential")
    token = draw(key, or_else(jnp.where(q > 0, weights, 0), q))
    return Choice(token, jnp.any(valid & (drafts == token)))


def cached(function: Callable[..., T]) -> Callable[..., T]:
    """Caches `function(p, q, ...)` for float64 arrays: `pmf` is called often with the same p, q."""

    @functools.lru_cache(maxsize=64)
    def of_bytes(p: bytes, q: bytes, *rest: int) -> T:
        return function(np.frombuffer(p), np.frombuffer(q), *rest)

    return lambda p, q, *rest: of_bytes(p.tobytes(), q.tobytes(), *rest)


def draw(key: PRNGKeyArray, weights: Probs, shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
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
    """Returns the first index of positive weight whose cumulative sum exceeds `level`.

    If no sum does, returns the last index of positive weight.
    """
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
    """Returns `weights` [V] if any is positive, else `fallback`.

    In exact arithmetic, a residual that is needed has positive mass; rounding can make it all 0.
    """
    return jnp.where(jnp.any(weights > 0), weights, fallback)


def exact_residual(p: ExactProbs, q: ExactProbs) -> ExactProbs:
    """Returns (q - p)+ [V], normalised, in float64; q itself if nothing is left."""
    rest = np.maximum(q - p, 0)
    return rest / rest.sum() if rest.sum() > 0 else q


def without(p: ExactProbs, tokens: ArrayLike) -> ExactProbs:
    """Returns p [V] without `tokens`, renormalised, in float64; all 0 if nothing is left."""
    rest = p.copy()
    rest[np.asarray(tokens, int)] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest
