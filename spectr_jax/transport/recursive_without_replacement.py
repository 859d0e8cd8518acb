r"""Recursive rejection of drafts without replacement (Yang et al., 2024; Jeon et al., 2024; GSD,
ERSD's Algorithm 4).

As `recursive`, but each draft is drawn from p without the drafts before it, renormalised, and
tested against that: with $p_1 = p$, $q_1 = q$ and N for normalising, draft i is accepted with
probability

$$\min\left(1, \frac{q_i(x_i)}{p_i(x_i)}\right), \qquad q_{i+1} = N (q_i - p_i)_+, \qquad
p_{i+1}(x) = \frac{p_i(x)}{1 - p_i(x_i)} \text{ for } x \ne x_i.$$
"""

import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice
from spectr_jax.transport.recursive import pmf_in_turn, reject_in_turn, residual
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.utils.errors import UserError

DRAFTS = "without_replacement"
LARGEST = 10_000_000
"""The most draft sequences that `acceptance` enumerates."""


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token; see `Plan.select`. Drafts are in the order in which they were
    drawn."""
    return reject_in_turn(key, p, q, drafts, valid, lambda p, draft: p.at[draft].set(0))


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    return pmf_in_turn(p, q, drafts, without)


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`. It enumerates k - 1 drafts, so it is for
    small vocabularies.

    Raises:
      UserError: too many of them.
    """
    support = int(np.sum(p > 0))
    if float(support) ** (min(k, support) - 1) > LARGEST:
        raise UserError(
            f"the exact acceptance of k={k} drafts without replacement goes through V^(k-1) = "
            f"{support}^{k - 1} sequences, "
            f"more than {LARGEST:,}; lower V or k, or measure it with `select`"
        )
    return _acceptance(p, q, k)


def _acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    if k == 0 or not p.any():
        return 0.0
    overlap, left = float(np.minimum(p, q).sum()), residual(p, q)
    if k == 1:
        return overlap
    rejected = np.maximum(p - q, 0)
    return float(
        overlap
        + sum(
            rejected[x] * _acceptance(without(p, x), left, k - 1)
            for x in np.flatnonzero(rejected).tolist()
        )
    )


def without(p: ExactProbs, token: int) -> ExactProbs:
    """Returns p [V] without a token, renormalised; all 0 if nothing is left."""
    rest = np.where(np.arange(len(p)) == token, 0, p)
    return rest / rest.sum() if rest.sum() > 0 else rest
