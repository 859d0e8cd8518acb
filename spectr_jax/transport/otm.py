r"""OTM-k: optimal transport with membership cost, solved exactly for k i.i.d. drafts.

SpecTr solves OTM-k (section 5, problem (3)) by a linear program of V^(k+1) variables.
For i.i.d. drafts the optimum has a closed form. If every draft is in a set H, only tokens of H can
be accepted, and they absorb at most q(H). So the rejection probability is at least p(H)^k - q(H)
for each H. By max-flow min-cut the largest of these bounds is attained:

$$\alpha_k(p, q) = 1 - D, \qquad D = \max\left(0, \ \max_j \left[P_j^k - Q_j\right]\right),$$

with tokens sorted by r = q / p ascending, and P, Q the prefix sums of p and q in that order. Hu et
al. (2025, arXiv 2502.18779) also give this optimum, and Thomas and Pal (2025, arXiv 2511.15898)
give other plans that attain it. The plan:

1. The winner among the drafts has distribution g = p rho with rho = clip(r, low, high). Let j be
   the maximiser in D. The first equation determines low, the second high, and the third follows:
   $$\sum_{i \le j} g_i = P_j^k, \qquad \sum_{i > j} g_i = 1 - P_j^k, \qquad \sum_i \min(g_i, q_i) =
   \alpha_k.$$
2. Tokens of equal r form a cell, and cells ascend in r. If each draft kept its cell and the highest
   cell won, cell c would win with mass p_c phi_c = P_c^k - P_{c-1}^k. Let h = g - p phi. Its prefix
   sums are >= 0, so cells of surplus (h > 0) are matched with later cells of deficit, first in
   first out by mass. A draft draws a partner cell uniformly by mass from its cell's part of the
   matching, and moves there with probability (rho - phi) / (phi_partner - phi), which is <= 1
   because rho ascends. Partners exchange equal masses, so the cell of a draft still has
   distribution p, but cell c now wins with mass g_c.
3. The draft in the highest cell wins; ties are broken uniformly. The winner y goes through
   Algorithm 1 as a single draft with distribution g: it is accepted with probability
   min(1, q(y) / g(y)); otherwise the token is drawn from (q - g)+.

For one draft g = p, and the plan is Algorithm 1. `pmf` and `acceptance` sort the tokens, and so
does `select` for small vocabularies. For large ones `select` sorts nothing: tokens whose ratios
agree to six bits share a cell, in O(V + cells). The plan stays exact, because the tokens of a cell
may move with different probabilities. In a cell that contains low, high or phi, the
tokens share one rho. This lowers the acceptance by 1e-6 on average over 72 cases with V = 1,024 and
8,192, and by at most 3e-5. In another case, with q within 1 % of p everywhere, the loss is 1e-3.
"""

import functools
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from spectr_jax.transport.base import product
from spectr_jax.transport.draws import uniform
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Scalar, Valid
from spectr_jax.transport.winner import ExactWin, Winner, WinnerPlan, highest_wins
from spectr_jax.utils import backend, sharding

SORTED = 256
"""Largest vocabulary that `select` sorts. Tokens of exactly equal ratio then share a cell."""
BITS, OCTAVES = 6, 16
"""For larger vocabularies an octave of the ratio has 2^BITS cells. The lowest cell extends to 0,
and the highest to infinity."""
LARGEST_K = 64
"""Largest number of drafts in `acceptance` under jit."""

PerCell: TypeAlias = Float[Any, " cells"]
"""Numbers by cell, in NumPy or JAX; most functions are written once for both."""
PerDraft: TypeAlias = Shaped[Array, "*#drafts"]


class Cells(NamedTuple):
    """Tokens grouped by their ratio r = q / p, ascending."""

    p: PerCell  # Mass of p.
    q: PerCell
    bottom: PerCell  # Smallest possible ratio of a token of the cell.
    top: PerCell  # Largest possible ratio.
    of_token: Int[Any, " vocab"]  # The cell of each token.


class WinnerPmf(NamedTuple):
    """The distribution of the winning draft, by cell, and its parameters."""

    rho: PerCell  # The winner's distribution divided by p.
    phi: PerCell  # The same if no draft moves.
    low: Float[Any, ""]  # Limits of rho.
    high: Float[Any, ""]
    rejection: Float[Any, ""]  # D, the smallest rejection probability.


class Matching(NamedTuple):
    """Which cells exchange drafts."""

    surplus: Float[Array, " cells"]  # h = g - p phi; negative for a deficit.
    sums: Float[Array, "2 cells"]  # Prefix sums of the surpluses and of the deficits.
    phi: Float[Array, " cells"]  # As in `WinnerPmf`.


class OTM(WinnerPlan):
    """The optimal plan for i.i.d. drafts."""

    def win(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Winner:
        cells = cells_of(p, q, len(drafts))
        winner = winner_pmf(cells.p, cells.q, jnp.maximum(jnp.sum(valid), 1))
        rho = token_ratios(p, q, cells.of_token, shared_ratios(cells, winner))
        level, move, tie = uniform(key, (3, *drafts.shape))
        final = moved(matched(cells, winner), cells.of_token[drafts], rho[drafts], level, move)
        return Winner(highest(final, valid, tie), p * rho)

    def exact_win(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactWin:
        cells, winner, moves = _exact(p, q, len(drafts))
        wins = highest_wins(moves[cells.of_token[list(drafts)]])
        return wins, p * winner.rho[cells.of_token]

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        return float(acceptance(p, q, k))


def highest(cells: DraftTokens, valid: Valid, tie: Float[Array, " k"]) -> Int[Array, ""]:
    """Returns the index of the valid draft in the highest cell; ties go to the largest `tie`."""
    cells = jnp.where(valid, cells, -1)
    return jnp.argmax(jnp.where(cells == jnp.max(cells), tie, -1))


def acceptance(
    p: Float[Any, " vocab"], q: Float[Any, " vocab"], k: int | float | Scalar
) -> Float[Any, ""]:
    """Returns alpha_k = 1 - D, the largest acceptance of any plan.

    NumPy arrays give the exact value in float64. JAX arrays give float32 under jit, for a traced k
    of at most `LARGEST_K`; for large V the cells round it slightly.
    """
    cells = cells_of(p, q, LARGEST_K) if isinstance(p, jax.Array) else exact_cells(p, q)
    alpha = 1 - winner_pmf(cells.p, cells.q, k).rejection
    return alpha * (alpha > 0)  # Rounding can make it slightly negative.


def winner_pmf(p: PerCell, q: PerCell, k: int | float | Scalar) -> WinnerPmf:
    """Returns the winner's distribution (step 1) for a real k >= 1, in NumPy or JAX.

    p [C] and q [C] are the masses of the cells, in ascending order of q / p.
    """
    xp = p.__array_namespace__()
    index, drawn = xp.arange(len(p)), p > 0
    # Above 1 a large power of `head_p` overflows. The sums of the tail as 1 minus the sums of the
    # head would lose small masses.
    head_p, head_q = xp.minimum(cumulative(xp, p), 1), cumulative(xp, q)
    tail_p, tail_q = (xp.maximum(cumulative(xp, x[::-1])[::-1] - x, 0) for x in (p, q))
    by_tail = xp.expm1(k * xp.log1p(-xp.minimum(tail_p, 0.75))) + tail_q
    excess = xp.where(head_p < 0.5, head_p**k - head_q, by_tail)
    at = xp.argmax(excess)
    rejection = xp.maximum(excess[at], 0)
    in_head = (index <= at) & (head_p > 0) & (rejection > 0)
    in_tail = (index >= at) & (tail_p > 0) & (rejection > 0)
    # At the right number of clipped cells, `low` is smallest and `high` largest.
    low = xp.min(xp.where(in_head, (rejection + head_q) / xp.where(in_head, head_p, 1), xp.inf))
    high = xp.max(xp.where(in_tail, (tail_q - rejection) / xp.where(in_tail, tail_p, 1), -xp.inf))
    # Without rejection nothing is clipped, since no ratio exceeds k. Rounding errors in the tail
    # could break low <= 1 <= high <= k.
    low = xp.where(rejection > 0, xp.minimum(low, 1), 0)
    high = xp.clip(xp.where(xp.any(in_tail), high, k), 1, k)
    rho = xp.clip(xp.where(drawn, q / xp.where(drawn, p, 1), high), low, high)
    share = xp.where(drawn, p / xp.where(drawn, head_p, 1), 0)
    # The difference of neighbouring powers as a product: a subtraction would lose small masses.
    log_rest = xp.log1p(-xp.where(share < 1, share, 0))
    phi = head_p**k * xp.where(share < 1, -xp.expm1(k * log_rest), 1) / xp.where(drawn, p, 1)
    return WinnerPmf(rho, xp.where(drawn, phi, 0), low, high, rejection)


def shared_ratios(cells: Cells, winner: WinnerPmf) -> Float[Array, " cells"]:
    """Returns rho [C] for cells whose tokens share it, and -1 where each token has its own rho.

    Each token has its own if all ratios of the cell are in low..high and on one side of phi.
    """
    by_token = (winner.low <= cells.bottom) & (cells.top <= winner.high)
    by_token &= (winner.phi <= cells.bottom) | (winner.phi >= cells.top)
    return jnp.where(by_token, -1, winner.rho)


def token_ratios(
    p: Probs, q: Probs, of_token: Int[Array, " vocab"], shared: Float[Array, " cells"]
) -> Probs:
    """Returns rho [V] of each token: the `shared` rho of its cell, or its own ratio q / p."""
    of_cell = shared[of_token]
    return jnp.where(of_cell < 0, q / jnp.where(p > 0, p, 1), of_cell)


def matched(cells: Cells, winner: WinnerPmf) -> Matching:
    """Returns which cells exchange drafts (step 2)."""
    surplus = cells.p * (winner.rho - winner.phi)
    sums = cumulative(jnp, jnp.stack([jnp.maximum(surplus, 0), jnp.maximum(-surplus, 0)]))
    return Matching(surplus, sums, winner.phi)


def moved(
    matching: Matching, cell: PerDraft, rho: PerDraft, level: PerDraft, move: float | PerDraft
) -> Int[Array, "..."]:
    """Returns the cell of each draft after step 2: its partner's, or the `cell` that it has.

    `level` and `move` are uniform in (0, 1). Arrays are broadcast.
    """
    surplus = matching.surplus[cell]
    gives = surplus >= 0  # The partner of a surplus is a deficit, and vice versa.
    given, taken = matching.sums
    mass = jnp.where(gives, given[cell], taken[cell]) - level * jnp.abs(surplus)
    # On a GPU a comparison with all cells is one kernel. On a CPU a binary search does less work.
    # `lax.platform_dependent` would be a conditional, which makes the host wait.
    method = "scan_unrolled" if backend.on_cpu() else "compare_all"
    search = functools.partial(jnp.searchsorted, method=method)
    partner = jnp.where(gives, search(taken, mass), search(given, mass))
    rise = matching.phi.at[partner].get(mode="clip") - matching.phi[cell]
    # Rounding can leave a surplus without a partner.
    exchanges = (partner < len(matching.phi)) & (rise != 0)
    toward = (rho - matching.phi[cell]) / jnp.where(exchanges, rise, 1)
    return jnp.where(exchanges & (move < toward), partner, cell)


def cells_of(p: Probs, q: Probs, most: int) -> Cells:
    """Returns the cells of p [V] and q [V] for at most `most` drafts."""
    return _sorted_cells(p, q) if len(p) <= SORTED else _ratio_cells(p, q, most)


def _sorted_cells(p: Probs, q: Probs) -> Cells:
    """Returns V cells, one for each distinct ratio; the remaining cells are empty."""
    ratio = jnp.where(p > 0, q / p, jnp.inf)
    order = jnp.argsort(ratio)
    ascending = ratio[order]
    level = jnp.cumsum(jnp.append(False, ascending[1:] > ascending[:-1]))
    of_token = jnp.zeros_like(order).at[order].set(level)
    levels = jnp.full_like(ratio, jnp.inf).at[of_token].set(ratio)
    mass_p, mass_q = _masses(p, q, of_token, len(p))
    return Cells(mass_p, mass_q, levels, levels, of_token)


def _ratio_cells(p: Probs, q: Probs, most: int) -> Cells:
    """Returns cells by the leading bits of the ratio, whose integers ascend as the ratios do.

    The highest cell has the ratios above `most`, which are clipped anyway.
    """
    highest = jnp.float32(1 << (most - 1).bit_length())
    first = _bits(highest) - (OCTAVES << BITS)
    count = (OCTAVES << BITS) + 1
    of_token = jnp.clip(_bits(jnp.where(p > 0, q / p, jnp.inf)) - first, 0, count - 1)
    leading = jnp.arange(1, count, dtype=jnp.int32) + first
    edges = jax.lax.bitcast_convert_type(leading << (23 - BITS), jnp.float32)
    mass_p, mass_q = _masses(p, q, of_token, count)
    bottom, top = jnp.pad(edges, (1, 0)), jnp.pad(edges, (0, 1), constant_values=jnp.inf)
    return Cells(mass_p, mass_q, bottom, top, of_token)


def _bits(ratio: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(ratio, jnp.int32) >> (23 - BITS)


def _masses(
    p: Probs, q: Probs, of_token: Int[Array, " vocab"], count: int
) -> Float[Array, "2 {count}"]:
    """Returns the masses [2, count] of p and q in each cell.

    Adding more than a thousand equal masses one by one loses precision in float32. So the masses
    are added in parts of the vocabulary, which devices can share, and scaled to the sums of p and q.
    """
    parts = min(1 << max(-(-len(p) // 1024) - 1, 0).bit_length(), 64)
    parts = max(parts, sharding.model_devices())

    def parted(x: Shaped[Array, " vocab"]) -> Shaped[Array, "parts tokens"]:
        return jnp.pad(x, (0, -len(x) % parts)).reshape(parts, -1)

    of_part = functools.partial(_masses_by_products if backend.on_tpu() else _added_masses, count)
    of_parts = jax.vmap(of_part)(parted(p), parted(q), parted(of_token))
    masses = sharding.whole(jnp.sum(of_parts, axis=0))
    total = jnp.sum(masses, axis=1, keepdims=True)
    return masses * (jnp.stack([jnp.sum(p), jnp.sum(q)])[:, None] / jnp.where(total > 0, total, 1))


def _added_masses(
    count: int, p: Probs, q: Probs, of_token: Int[Array, " vocab"]
) -> Float[Array, "2 {count}"]:
    """Returns the masses [2, count] of p and q in each cell, by a scatter."""
    added = jnp.zeros((2, count), p.dtype).at[:, of_token]
    return added.add(jnp.stack([p, q]), mode="promise_in_bounds")


def _masses_by_products(
    count: int, p: Probs, q: Probs, of_token: Int[Array, " vocab"]
) -> Float[Array, "2 {count}"]:
    """Returns `_added_masses` for a TPU, whose scatters take one update at a time.

    Cell 32 i + j is entry (i, j) of a product of two indicator matrices, one of them weighted.
    """
    rows = jax.nn.one_hot(of_token // 32, -(-count // 32), dtype=p.dtype)
    columns = jax.nn.one_hot(of_token % 32, 32, dtype=p.dtype)
    weighted = jnp.stack([p, q])[:, :, None] * rows
    return product(weighted.swapaxes(1, 2), columns).reshape(2, -1)[:, :count]


def exact_cells(p: ExactProbs, q: ExactProbs) -> Cells:
    """Returns a cell for each distinct ratio, in float64."""
    ratio = np.divide(q, p, out=np.full(len(p), np.inf), where=p > 0)
    levels, of_token = np.unique(ratio, return_inverse=True)
    return Cells(np.bincount(of_token, p), np.bincount(of_token, q), levels, levels, of_token)


def _exact(
    p: ExactProbs, q: ExactProbs, k: int | float
) -> tuple[Cells, WinnerPmf, Float[np.ndarray, "cells cells"]]:
    """Returns the cells, the winner's pmf, and the pmf [C, C] of a draft's new cell by its old."""
    cells = exact_cells(p, q)
    winner = winner_pmf(cells.p, cells.q, k)
    surplus = cells.p * (winner.rho - winner.phi)
    gives, takes = np.maximum(surplus, 0), np.maximum(-surplus, 0)
    given, taken = np.cumsum(gives), np.cumsum(takes)
    before = np.maximum((given - gives)[:, None], taken - takes)
    matched = np.maximum(np.minimum(given[:, None], taken) - before, 0)
    matched[:, surplus >= 0] = matched[surplus <= 0] = 0
    rise = winner.phi - winner.phi[:, None]
    exchanged = np.divide(matched, rise, out=np.zeros_like(matched), where=matched > 0)
    exchanged += exchanged.T
    moves = exchanged / np.where(cells.p > 0, cells.p, 1)[:, None]
    return cells, winner, moves + np.diag(1 - moves.sum(axis=1))


def cumulative(xp: ModuleType, x: Float[Any, "*rows n"]) -> Float[Any, "*rows n"]:
    """Returns the cumulative sum along the last axis; JAX's scans of long rows would be slow."""
    width, n = 64, x.shape[-1]
    if xp is np or n <= width:
        return xp.cumsum(x, axis=-1)
    rows = xp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % width)]).reshape(*x.shape[:-1], -1, width)
    within = product(rows, xp.triu(xp.ones((width, width), x.dtype)))
    before = xp.cumsum(within[..., -1], axis=-1) - within[..., -1]
    return (within + before[..., None]).reshape(*x.shape[:-1], -1)[..., :n]
