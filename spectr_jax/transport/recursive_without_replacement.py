r"""Recursive rejection of drafts without replacement (GSD, ERSD's Algorithm 4).

The plan is that of Yang et al., 2024, and Jeon et al., 2024. It is `recursive` with one change:
each draft is drawn from, and tested against, p without the drafts before it, renormalised. Let
$p_1 = p$ and $q_1 = q$, and let N normalise. Draft i is accepted with probability

$$\min\left(1, \frac{q_i(x_i)}{p_i(x_i)}\right), \qquad q_{i+1} = N (q_i - p_i)_+, \qquad
p_{i+1}(x) = \frac{p_i(x)}{1 - p_i(x_i)} \text{ for } x \ne x_i.$$
"""

from typing import Any

import numpy as np

from spectr_jax.transport import rules
from spectr_jax.transport.base import exact_residual, without
from spectr_jax.transport.recursive import Recursive
from spectr_jax.transport.types import ExactProbs
from spectr_jax.utils.errors import UserError

LARGEST = 10_000_000
"""The largest number of sequences of drafts that `acceptance` enumerates."""


class RecursiveWithoutReplacement(Recursive):
    """Recursive rejection of drafts without replacement."""

    rule = rules.WITHOUT_REPLACEMENT

    def after(self, p: Any, draft: Any) -> Any:
        xp = p.__array_namespace__()
        return xp.where(xp.arange(len(p)) == draft, 0, p)

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        # Enumerates the first k - 1 drafts.
        support = int(np.sum(p > 0))
        if float(support) ** (min(k, support) - 1) > LARGEST:
            raise UserError(
                f"V={support}, k={k}: the acceptance takes V^(k-1) = {support}^{k - 1} sequences, "
                f"more than {LARGEST:,}; lower V or k, or measure with `select`"
            )
        return _acceptance(p, q, k)


def _acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    if not p.any():
        return 0.0
    overlap, left = float(np.minimum(p, q).sum()), exact_residual(p, q)
    if k == 1:
        return overlap
    rejected = np.maximum(p - q, 0)
    tokens = np.flatnonzero(rejected).tolist()
    later = sum(rejected[x] * _acceptance(without(p, x), left, k - 1) for x in tokens)
    return float(overlap + later)
