r"""The naive plan: a draw from q, independent of the drafts. It is a reference point.

$$\alpha = \sum_x q(x) \left(1 - (1 - p(x))^k\right)$$
"""

import numpy as np

from spectr_jax.transport.base import Plan
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Scalar, Valid


class Naive(Plan):
    """A draw from q, whatever the drafts are."""

    def choose(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Scalar:
        return self.bonus(key, q)

    def exact_pmf(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
        return q

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        return float(np.sum(q * -np.expm1(k * np.log1p(-np.minimum(p, 1 - 1e-16)))))
