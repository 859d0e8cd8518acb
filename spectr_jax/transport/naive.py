r"""The naive plan: a draw from q, independent of the drafts. It is a reference point.

$$\alpha = \sum_x q(x) \left(1 - (1 - p(x))^k\right)$$
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice, draw
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Chooses a token; see `Plan.select`."""
    token = draw(key, q)
    return Choice(token, jnp.any(valid & (drafts == token)))


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns q, whatever the drafts; see `Plan.pmf`."""
    return q


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`."""
    return float(np.sum(q * -np.expm1(k * np.log1p(-np.minimum(p, 1 - 1e-16)))))
