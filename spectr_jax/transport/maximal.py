r"""Maximal coupling of one draft and the target (SpecTr, Algorithm 1; speculative decoding).

The draft x is accepted with probability min(1, q(x) / p(x)); otherwise the token is drawn from
(q - p)+, normalised. No plan for one draft has a higher acceptance:

$$\alpha = \sum_x \min(p(x), q(x)) = 1 - \mathrm{TV}(p, q).$$

If there are several drafts, only the first valid one is used.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.transport.winner import Winner, select_winner, winner_accepted_pmf


def win(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Winner:
    """Returns the first valid draft as the winner; see `Plan.win`."""
    return Winner(jnp.argmax(valid), p)


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Chooses a token by SpecTr's Algorithm 1; see `Plan.select`."""
    return select_winner(win, key, p, q, drafts, valid)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    return winner_accepted_pmf(q, p, drafts[:1], np.ones(1))


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`.

    It is 1 - TV(p, q), plus the probability that the residual equals one of the k - 1 other drafts.
    """
    overlap = np.minimum(p, q).sum()
    return float(overlap + np.sum(np.maximum(q - p, 0) * (1 - (1 - p) ** (k - 1))))
