r"""Recursive rejection of i.i.d. drafts (SpecInfer's multi-step verification, Miao et al., 2023).

The first draft goes through Algorithm 1. If it is rejected, the next draft does, with the residual
distribution instead of q, and so on. Let $q_1 = q$, and let N normalise. Draft i is accepted with
probability

$$\min\left(1, \frac{q_i(x_i)}{p(x_i)}\right), \qquad q_{i+1} = N (q_i - p)_+.$$
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice, draw, exact_residual, or_else
from spectr_jax.transport.types import (
    BoolScalar,
    Drafts,
    ExactProbs,
    FloatScalar,
    IntScalar,
    Probs,
    Valid,
)


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Chooses a token; see `Plan.select`."""
    return reject_in_turn(key, p, q, drafts, valid, lambda p, draft: p)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    return pmf_in_turn(p, q, drafts, lambda p, draft: p)


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`.

    The residual never equals a rejected draft, because it is 0 at that token.
    """
    none, left = 1.0, q
    for _ in range(k):
        none *= 1 - np.minimum(p, left).sum()
        left = exact_residual(p, left)
    return 1 - none


def reject_in_turn(
    key: PRNGKeyArray,
    p: Probs,
    q: Probs,
    drafts: Drafts,
    valid: Valid,
    next_pmf: Callable[[Probs, IntScalar], Probs],
) -> Choice:
    """Chooses a token by recursive rejection; consumes `key`.

    `next_pmf(p, draft)` is proportional to the distribution of the draft after `draft`.
    """
    accept_key, residual_key = jax.random.split(key)

    def attempt(
        carry: tuple[Probs, Probs, IntScalar], this: tuple[IntScalar, BoolScalar, FloatScalar]
    ) -> tuple[tuple[Probs, Probs, IntScalar], None]:
        pmf, left, chosen = carry
        draft, usable, uniform = this
        # Normalised first: in float32 a product with a small mass may be 0.
        given, wanted = pmf / jnp.sum(pmf), left / jnp.sum(left)
        accepted = usable & (uniform * given[draft] < wanted[draft])
        rest = or_else(jnp.maximum(wanted - given, 0), left)
        return (
            jnp.where(usable, next_pmf(pmf, draft), pmf),
            jnp.where(usable, rest, left),
            jnp.where((chosen < 0) & accepted, draft, chosen),
        ), None

    uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
    (_, left, chosen), _ = jax.lax.scan(attempt, (p, q, jnp.int32(-1)), (drafts, valid, uniforms))
    token = jnp.where(chosen < 0, draw(residual_key, left), chosen)
    return Choice(token, jnp.any(valid & (drafts == token)))


def pmf_in_turn(
    p: ExactProbs,
    q: ExactProbs,
    drafts: Sequence[int],
    next_pmf: Callable[[ExactProbs, int], ExactProbs],
) -> ExactProbs:
    """Returns the distribution [V] of recursive rejection given the drafts, in float64."""
    result, none_before, left = np.zeros(len(p)), 1.0, q
    for draft in drafts:
        accept = min(1.0, left[draft] / p[draft])
        result[draft] += none_before * accept
        none_before *= 1 - accept
        left, p = exact_residual(p, left), next_pmf(p, draft)
    return result + none_before * left
