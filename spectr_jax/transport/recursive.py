r"""Recursive rejection of i.i.d. drafts (SpecInfer's multi-step verification, Miao et al., 2023).

The first draft goes through Algorithm 1. If it is rejected, the next draft does, with the residual
distribution instead of q, and so on. Let $q_1 = q$, and let N normalise. Draft i is accepted with
probability

$$\min\left(1, \frac{q_i(x_i)}{p(x_i)}\right), \qquad q_{i+1} = N (q_i - p)_+.$$
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.transport.base import Plan, exact_residual, or_else
from spectr_jax.transport.draws import draw
from spectr_jax.transport.types import (
    BoolScalar,
    Drafts,
    ExactProbs,
    FloatScalar,
    IntScalar,
    Key,
    Probs,
    Valid,
)


class Recursive(Plan):
    """Recursive rejection; each draft has the distribution `after(p, draft)` of those before it."""

    def after(self, p: Any, draft: Any) -> Any:
        """Returns weights [V] of the draft after `draft`, in NumPy or JAX, given those of `draft`."""
        return p

    def choose(self, key: Key, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> IntScalar:
        accept_key, residual_key = jax.random.split(key)

        def attempt(
            carry: tuple[Probs, Probs, IntScalar], this: tuple[IntScalar, BoolScalar, FloatScalar]
        ) -> tuple[tuple[Probs, Probs, IntScalar], None]:
            p, left, chosen = carry
            draft, usable, uniform = this
            # Normalised first: in float32 a product with a small mass may be 0.
            drawn, wanted = p / jnp.sum(p), left / jnp.sum(left)
            accepted = usable & (uniform * drawn[draft] < wanted[draft])
            rest = or_else(jnp.maximum(wanted - drawn, 0), left)
            return (
                jnp.where(usable, self.after(p, draft), p),
                jnp.where(usable, rest, left),
                jnp.where((chosen < 0) & accepted, draft, chosen),
            ), None

        uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
        start = p, q, jnp.int32(-1)
        (_, left, chosen), _ = jax.lax.scan(attempt, start, (drafts, valid, uniforms))
        return jnp.where(chosen < 0, draw(residual_key, left), chosen)

    def exact_pmf(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
        result, none_before, left = np.zeros(len(p)), 1.0, q
        for draft in drafts:
            drawn = p / p.sum()
            accept = min(1.0, left[draft] / drawn[draft])
            result[draft] += none_before * accept
            none_before *= 1 - accept
            left, p = exact_residual(drawn, left), self.after(p, draft)
        return result + none_before * left

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        # The residual never equals a rejected draft, because it is 0 at that token.
        none, left = 1.0, q
        for _ in range(k):
            none *= 1 - np.minimum(p, left).sum()
            left = exact_residual(p, left)
        return 1 - none
