r"""Greedy multi-path: the draft of highest q / p wins (Thomas and Pal, 2026, arXiv 2602.16961).

With tokens sorted by q / p ascending and P the prefix sums of p, the winner has distribution

$$g_j = P_j^k - P_{j-1}^k.$$

This is the `otm` plan without moves between cells. It is exact, but its acceptance is lower than
that of `otm`. It is made for block verification along the path of winners (`gbv_conditional`, and
`gbv` at the root).
"""

import jax.numpy as jnp
import numpy as np

from spectr_jax.transport import otm
from spectr_jax.transport.draws import uniform
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Valid
from spectr_jax.transport.winner import ExactWin, Winner, WinnerPlan, highest_wins


class GreedyMultiPath(WinnerPlan):
    """The draft of highest q / p wins.

    Ties are broken at random; for large V, ratios that agree to six bits count as ties.
    """

    def win(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Winner:
        cells = otm.cells_of(p, q, len(drafts))
        phi = otm.winner_pmf(cells.p, cells.q, jnp.maximum(jnp.sum(valid), 1)).phi
        tie = uniform(key, drafts.shape)
        index = otm.highest(cells.of_token[drafts], valid, tie)
        return Winner(index, p * phi[cells.of_token])

    def exact_win(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactWin:
        cells = otm.exact_cells(p, q)
        wins = highest_wins(np.eye(len(cells.p))[cells.of_token[list(drafts)]])
        return wins, p * otm.winner_pmf(cells.p, cells.q, len(drafts)).phi[cells.of_token]

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        # It includes the probability that the residual equals a draft of a lower ratio.
        cells = otm.exact_cells(p, q)
        g = p * otm.winner_pmf(cells.p, cells.q, k).phi[cells.of_token]
        residual, rejected = np.maximum(q - g, 0), np.maximum(g - q, 0)
        if residual.sum() == 0:
            return 1.0
        head, mass = np.cumsum(cells.p)[cells.of_token], cells.p[cells.of_token]
        hit = 0.0
        for y in np.flatnonzero(rejected):
            # P(z is not a draft | y wins), for each z of a lower ratio. A z of the same ratio has no
            # residual.
            absent = np.maximum(head[y] - p, 0) ** k - np.maximum(head[y] - mass[y] - p, 0) ** k
            absent = absent * p[y] / mass[y] / g[y]
            lower = cells.of_token < cells.of_token[y]
            hit += rejected[y] * np.sum((residual / residual.sum() * (1 - absent))[lower])
        return float(np.minimum(g, q).sum() + hit)
