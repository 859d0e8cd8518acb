r"""The draft of the highest ratio q / p wins (greedy multi-path, Thomas and Pal, 2026, arXiv
2602.16961).

With tokens sorted by q / p ascending and P the prefix sums of p, the winner's distribution is

$$g_j = P_j^k - P_{j-1}^k,$$

as in the `otm` plan without the moves between cells. It is exact, but accepts less at one node; its
use is block verification along the path of winners (`gbv_conditional`; `gbv` at the root).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport import otm
from spectr_jax.transport.base import Choice
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.transport.winner import Winner, highest_wins, select_winner, winner_accepted_pmf


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token; see `Plan.select`. Runs in the jitted sampler."""
    return select_winner(win, key, p, q, drafts, valid)


def win(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Winner:
    """Returns the winner; see `Plan.win`. Ties, and at large V ratios that agree to six bits, are
    broken at random."""
    cells = otm.cells_of(p, q, len(drafts))
    phi = otm.winner_pmf(cells.p, cells.q, jnp.maximum(jnp.sum(valid), 1)).phi
    height = jnp.where(valid, cells.of_token[drafts], -1)
    tie = jax.random.uniform(key, drafts.shape)
    return Winner(
        jnp.argmax(jnp.where(height == jnp.max(height), tie, -1)), p * phi[cells.of_token]
    )


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    cells = otm.exact_cells(p, q)
    wins = highest_wins(np.eye(len(cells.p))[cells.of_token[list(drafts)]])
    return winner_accepted_pmf(q, _winner_pmf(p, q, cells, len(drafts)), drafts, wins)


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`. The residual may hit a draft whose ratio
    is lower."""
    cells = otm.exact_cells(p, q)
    g = _winner_pmf(p, q, cells, k)
    residual, rejected = np.maximum(q - g, 0), np.maximum(g - q, 0)
    if residual.sum() == 0:
        return 1.0
    head = np.cumsum(cells.p)
    below = (head - cells.p)[cells.of_token]
    head = head[cells.of_token]
    hit = 0.0
    for y in np.flatnonzero(rejected):
        # That y wins and z, of a lower ratio, is no draft, over that y wins; z of the same ratio
        # has no residual.
        absent = np.maximum(head[y] - p, 0) ** k - np.maximum(below[y] - p, 0) ** k
        absent = absent * p[y] / cells.p[cells.of_token[y]] / g[y]
        lower = cells.of_token < cells.of_token[y]
        hit += rejected[y] * np.sum((residual / residual.sum() * (1 - absent))[lower])
    return float(np.minimum(g, q).sum() + hit)


def _winner_pmf(p: ExactProbs, q: ExactProbs, cells: otm.Cells, k: int) -> ExactProbs:
    g: ExactProbs = p * otm.winner_pmf(cells.p, cells.q, k).phi[cells.of_token]
    return g
