r"""Recursive rejection of drafts without replacement (GSD, ERSD's Algorithm 4).

The plan is that of Yang et al., 2024, and Jeon et al., 2024. It is `recursive` with one change:
each draft is drawn from, and tested against, p without the drafts before it, renormalised. Let
$p_1 = p$ and $q_1 = q$, and let N normalise. Draft i is accepted with probability

$$\min\left(1, \frac{q_i(x_i)}{p_i(x_i)}\right), \qquad q_{i+1} = N (q_i - p_i)_+, \qquad
p_{i+1}(x) = \frac{p_i(x)}{1 - p_i(x_i)} \text{ for } x \ne x_i.$$
"""

import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice, exact_residual, without
from spectr_jax.transport.recursive import pmf_in_turn, reject_in_turn
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.utils.errors import UserError

DRAFTS = "without_replacement"
LARGEST = 10_000_000
"""The largest number of sequences of drafts that `acceptance` enumerates."""


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Chooses a token; see `Plan.select`. `drafts` are in the order in which they were drawn."""
    return reject_in_turn(key, p, q, drafts, valid, lambda p, draft: p.at[draft].set(0))


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    return pmf_in_turn(p, q, drafts, without)


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`. It enumerates the first k - 1 drafts."""
    support = int(np.sum(p > 0))
    if float(support) ** (min(k, support) - 1) > LARGEST:
        raise UserError(
            f"V={support}, k={k}: the acceptance takes V^(k-1) = {support}^{k - 1} sequences, more "
            f"than {LARGEST:,}; lower V or k, or measure with `select`"
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
