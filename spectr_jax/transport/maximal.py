r"""Maximal coupling of one draft and the target (SpecTr, Algorithm 1; speculative decoding).

The draft x is accepted with probability min(1, q(x) / p(x)), else the token is drawn from (q - p)+,
normalised. No plan for one draft accepts more often:

$$\alpha = \sum_x \min(p(x), q(x)) = 1 - \mathrm{TV}(p, q).$$

With several drafts only the first valid one is used.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.transport.winner import Winner, select_winner


def win(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Winner:
    """Returns the first valid draft as the winner; see `Plan.win`."""
    return Winner(jnp.argmax(valid), p)


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token by SpecTr's Algorithm 1; see `Plan.select`."""
    return select_winner(win, key, p, q, drafts, valid)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    residual = np.maximum(q - p, 0)
    residual = residual / residual.sum() if residual.sum() > 0 else q
    accept = min(1.0, q[drafts[0]] / p[drafts[0]])
    result: ExactProbs = accept * np.eye(len(p))[drafts[0]] + (1 - accept) * residual
    return result


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns 1 - TV(p, q) from the first draft, and the chance that the residual hits one of the k
    - 1 others."""
    overlap = np.minimum(p, q).sum()
    return float(overlap + np.sum(np.maximum(q - p, 0) * (1 - (1 - p) ** (k - 1))))
