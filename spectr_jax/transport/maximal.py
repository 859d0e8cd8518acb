r"""Maximal coupling of one draft and the target (SpecTr, Algorithm 1; speculative decoding).

The draft x is accepted with probability min(1, q(x) / p(x)); otherwise the token is drawn from
(q - p)+, normalised. No plan for one draft has a higher acceptance:

$$\alpha = \sum_x \min(p(x), q(x)) = 1 - \mathrm{TV}(p, q).$$

If there are several drafts, only the first valid one is used.
"""

import jax.numpy as jnp
import numpy as np

from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Valid
from spectr_jax.transport.winner import ExactWin, Winner, WinnerPlan


class Maximal(WinnerPlan):
    """Maximal coupling: the first valid draft is the winner."""

    def win(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Winner:
        return Winner(jnp.argmax(valid), p)

    def exact_win(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactWin:
        return np.eye(len(drafts))[0], p

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        # 1 - TV(p, q), plus the probability that the residual equals one of the k - 1 other drafts.
        overlap = np.minimum(p, q).sum()
        return float(overlap + np.sum(np.maximum(q - p, 0) * (1 - (1 - p) ** (k - 1))))
