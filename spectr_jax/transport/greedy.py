r"""Greedy drafts, and the optimal plan for them (Hu et al., 2025, arXiv 2502.18779).

The first k - 1 drafts are the likeliest tokens of p, the set H. The last draft is drawn from p',
which is p without H, renormalised. Only this draft is random, and a token of H is always a draft.
So the optimum is Algorithm 1 with p' as the draft distribution, and

$$\alpha = q(H) + \sum_x \min(p'(x), q(x)).$$
"""

import jax.numpy as jnp
import numpy as np

from spectr_jax.transport import rules
from spectr_jax.transport.base import without
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Valid
from spectr_jax.transport.winner import ExactWin, Winner, WinnerPlan


class Greedy(WinnerPlan):
    """The last valid draft, which is the random one, is the winner."""

    rule = rules.GREEDY

    def win(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Winner:
        index = jnp.arange(len(drafts))
        last = jnp.max(jnp.where(valid, index, -1))
        rest = p.at[jnp.where(valid & (index < last), drafts, len(p))].set(0, mode="drop")
        # Division first: in float32 a product with a small mass may be 0.
        return Winner(last, rest / jnp.sum(rest))

    def exact_win(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactWin:
        return np.eye(len(drafts))[-1], without(p, drafts[:-1])

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        likeliest = np.argsort(-p, kind="stable")[: k - 1]
        accepted = np.minimum(without(p, likeliest), q).sum()
        return float(accepted + q[likeliest[p[likeliest] > 0]].sum())
