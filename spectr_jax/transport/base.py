r"""The interface of transport plans, and what several plans share.

Given k drafts $x_1, \dots, x_k$ with distribution p, a plan emits y with probability
$\pi(y \mid x_1, \dots, x_k)$ (`Plan.pmf`). The plan is exact if y, averaged over the drafts, has
distribution q. Its acceptance is the probability that y is among the drafts (`Plan.acceptance`):

$$\sum_{x_1, \dots, x_k} P(x_1, \dots, x_k) \ \pi(y \mid x_1, \dots, x_k) = q(y), \qquad
\alpha = P(y = x_i \text{ for some } i).$$
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from spectr_jax.transport import checks
from spectr_jax.transport.draws import draw
from spectr_jax.transport.rules import IID, Rule
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Scalar, Valid

T = TypeVar("T")


class Choice(NamedTuple):
    """The token that a plan chose, distributed as q, and whether it is one of the valid drafts.

    A draw from the residual can equal a draft by chance; that counts as accepted.
    """

    token: Scalar
    accepted: Scalar


@dataclasses.dataclass(frozen=True)
class Plan(abc.ABC):
    """A transport plan. A plan is a frozen dataclass whose fields are its options.

    Equal plans must hash alike, so that jit compiles once. A subclass defines `choose`, `exact_pmf`
    and `exact_acceptance`, whose arguments are clean: callers have repaired or refused all others.

    Attributes:
      name: as registered; that of the class for a plan that `transport.get` did not return.
      rule: how the drafts are drawn from p; i.i.d. by default.
    """

    name: ClassVar[str]
    rule: ClassVar[Rule] = IID

    def __init_subclass__(cls) -> None:
        cls.name = cls.__name__

    def choose(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Scalar:
        """Returns a token with distribution q [V], under jit and vmap; consumes `key`.

        The drafts from p [V] are in the order in which they were drawn. Those that are not `valid`
        are padding; without a valid draft the token is drawn from q. p may be 0 everywhere, and if
        q is, any token will do. If `rule.shares_key`, `key` is the key that drew the drafts.

        This default is for analysis with small vocabularies: each choice calls back to the host,
        which computes `exact_pmf`.
        """

        def on_host(*arrays: ArrayLike) -> Float[np.ndarray, " vocab"]:
            p, q, drafts, valid = (np.asarray(array) for array in arrays)
            p, q = p.astype(np.float64), q.astype(np.float64)
            if not (valid.any() and q.any()):
                return q.astype(np.float32)
            tokens = tuple(drafts[valid].tolist())
            return self.exact_pmf(p / p.sum(), q / q.sum(), tokens).astype(np.float32)

        shape = jax.ShapeDtypeStruct(q.shape, jnp.float32)
        weights = jax.pure_callback(on_host, shape, p, q, drafts, valid, vmap_method="sequential")
        return draw(jax.random.split(key)[1], or_else(jnp.where(q > 0, weights, 0), q))

    def bonus(self, key: Key, q: Probs) -> Scalar:
        """Returns a token with distribution q [V] where there are no drafts; consumes `key`.

        It is -1 if q is 0 everywhere. Our plans draw the token that `choose` returns without a valid
        draft; with `rule.shares_key` it is that of `choose`.
        """
        if self.rule.shares_key:
            none = jnp.zeros(1, jnp.int32)
            token = self.choose(key, q, q, none, none > 0)
        else:
            token = draw(jax.random.split(key)[1], q)  # The key of our plans' residuals.
        return jnp.where(jnp.any(q > 0), token, -1)

    @abc.abstractmethod
    def exact_pmf(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
        """Returns the distribution [V] of the token given `drafts`, in float64."""

    @abc.abstractmethod
    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        """Returns the probability that the token is among k drafts from p [V], in float64."""

    def select(
        self, key: Key, p: ArrayLike, q: ArrayLike, drafts: ArrayLike, valid: ArrayLike
    ) -> Choice:
        """Chooses a token with distribution q [V], given k drafts from p [V]; consumes `key`.

        Works under jit and vmap. Drafts that are not `valid` [k] are padding; the number of valid
        drafts may be traced. A token with q = 0 is never chosen. Outside jit, bad arguments raise.
        Under jit:

        - Without a valid draft the token is drawn from q.
        - A draft with p = 0 or outside the vocabulary is not valid.
        - Negative and NaN entries of p and q count as 0, and the rest is scaled to sum to 1.
        - If q has no positive entry, or an infinite one, the token is -1.

        Raises:
          UserError: outside jit, if p or q is not a distribution or the drafts cannot come from p.
        """
        checks.check_whole(drafts)
        p, q = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
        drafts, valid = jnp.asarray(drafts, jnp.int32), jnp.asarray(valid, bool)
        if not any(isinstance(array, jax.core.Tracer) for array in (p, q, drafts, valid)):
            exact, _ = checks.check_distributions(p, q)
            checks.check_drafts(exact, np.asarray(drafts)[np.asarray(valid)], self.rule)
        p, q = normalised(p), normalised(q)
        drawn = p.at[drafts].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        valid &= drawn > 0
        token = jnp.where(jnp.any(q > 0), self.choose(key, p, q, drafts, valid), -1)
        return Choice(token, jnp.any(valid & (drafts == token)))

    def pmf(self, p: ArrayLike, q: ArrayLike, drafts: Sequence[int]) -> ExactProbs:
        """Returns the exact distribution [V] of the token given the drafts, in float64.

        Raises:
          UserError: p or q is not a distribution, the drafts cannot come from p, or the problem is
            too large for the plan.
        """
        p, q = checks.check_distributions(p, q)
        return self.exact_pmf(p, q, checks.check_drafts(p, drafts, self.rule))

    def acceptance(self, p: ArrayLike, q: ArrayLike, k: int | float) -> float:
        """Returns the exact probability that the token is among k drafts, in float64.

        Raises:
          UserError: p or q is not a distribution, k < 1, or the problem is too large for the plan.
        """
        p, q = checks.check_distributions(p, q)
        return float(self.exact_acceptance(p, q, checks.check_number(k)))


def normalised(pmf: Probs) -> Probs:
    """Returns the positive entries of `pmf` [V], scaled to sum to 1, and 0 for all others."""
    positive = jnp.where(pmf > 0, pmf, 0)
    total = jnp.sum(positive)
    return positive / jnp.where(total > 0, total, 1)


def cached(function: Callable[..., T]) -> Callable[..., T]:
    """Caches `function(p, q, ...)` for float64 arrays: `pmf` is called often with the same p, q."""

    @functools.lru_cache(maxsize=64)
    def of_bytes(p: bytes, q: bytes, *rest: int) -> T:
        return function(np.frombuffer(p), np.frombuffer(q), *rest)

    return lambda p, q, *rest: of_bytes(p.tobytes(), q.tobytes(), *rest)


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
