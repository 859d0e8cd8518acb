r"""Recursive rejection of i.i.d. drafts (SpecInfer's multi-step verification, Miao et al., 2023).

The first draft goes through Algorithm 1. If it is rejected, the next draft does, with the residual
distribution instead of q, and so on. Let $q_1 = q$, and let N normalise. Draft i is accepted with
probability

$$\min\left(1, \frac{q_i(x_i)}{p(x_i)}\right), \qquad q_{i+1} = N (q_i - p)_+.$$

For drafts without replacement (GSD, ERSD's Algorithm 4; Yang et al., 2024; Jeon et al., 2024), each
draft is drawn from, and tested against, p without the drafts before it: p is replaced by p_i, where
$p_1 = p$ and

$$p_{i+1}(x) = \frac{p_i(x)}{1 - p_i(x_i)} \text{ for } x \ne x_i.$$
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.transport import rules
from spectr_jax.transport.base import Plan, exact_residual, or_else, without
from spectr_jax.transport.draws import draw, uniform
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Scalar, Valid
from spectr_jax.utils.errors import UserError

LARGEST = 10_000_000
"""The largest number of sequences of drafts that `acceptance` enumerates."""


class Recursive(Plan):
    """Recursive rejection; each draft has the distribution `after(p, draft)` of those before it."""

    def after(self, p: Any, draft: Any) -> Any:
        """Returns weights [V] of the draft after `draft`, in NumPy or JAX, given those of `draft`."""
        return p

    def choose(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Scalar:
        accept_key, residual_key = jax.random.split(key)

        def attempt(carry: Any, this: tuple[Scalar, Scalar, Scalar]) -> tuple[Any, None]:
            p, left, chosen = carry
            draft, usable, level = this
            # Normalised first: in float32 a product with a small mass may be 0.
            drawn, wanted = p / jnp.sum(p), left / jnp.sum(left)
            accepted = usable & (level * drawn[draft] < wanted[draft])
            rest = or_else(jnp.maximum(wanted - drawn, 0), left)
            return (
                jnp.where(usable, self.after(p, draft), p),
                jnp.where(usable, rest, left),
                jnp.where((chosen < 0) & accepted, draft, chosen),
            ), None

        uniforms = uniform(accept_key, drafts.shape)
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


class RecursiveWithoutReplacement(Recursive):
    """Recursive rejection of drafts without replacement."""

    rule = rules.WITHOUT_REPLACEMENT

    def after(self, p: Any, draft: Any) -> Any:
        xp = p.__array_namespace__()
        return xp.where(xp.arange(len(p)) == draft, 0, p)

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        # Enumerates the first k - 1 drafts.
        support = int(np.sum(p > 0))
        if float(max(support, 1)) ** (min(k, support) - 1) > LARGEST:
            raise UserError(
                f"V={support}, k={k}: the acceptance takes V^(k-1) = {support}^{k - 1} sequences, "
                f"more than {LARGEST:,}; lower V or k, or measure with `select`"
            )
        overlap, left, rejected = np.minimum(p, q).sum(), exact_residual(p, q), np.maximum(p - q, 0)
        tokens = np.flatnonzero(rejected * (k > 1))
        later = (rejected[x] * self.exact_acceptance(without(p, x), left, k - 1) for x in tokens)
        return float(overlap + sum(later))
