r"""Optimal transport with membership cost, OTM-k, solved exactly for k i.i.d. drafts (SpecTr,
section 5, problem (3)).

SpecTr solves OTM-k by a linear program of V^(k+1) variables (`otm_lp`). For i.i.d. drafts the
optimum has a closed form: if every draft falls in a set H, only tokens of H can be accepted, and
they absorb at most q(H); so the rejection probability is at least p(H)^k - q(H) for each H, and by
max-flow min-cut the largest of these is attained,

$$\alpha_k(p, q) = 1 - D, \qquad D = \max\left(0, \ \max_j \left[P_j^k - Q_j\right]\right),$$

with tokens sorted by r = q / p ascending and P, Q the prefix sums of p and q in that order (the
optimum: also Hu et al., 2025, arXiv 2502.18779; other plans that attain it: Thomas and Pal, 2025,
arXiv 2511.15898). The plan:

1. The winner among the drafts has distribution g = p rho, rho = clip(r, low, high). With j the
   maximiser of D, low is set for the first of these equations and high for the second, and the
   third follows:
   $$\sum_{i \le j} g_i = P_j^k, \qquad \sum_{i > j} g_i = 1 - P_j^k, \qquad \sum_i \min(g_i, q_i) =
   \alpha_k.$$
2. The tokens are cells of a priority, ascending in r. If each draft kept its own cell and the
   highest cell won, cell c would win with mass p_c phi_c = P_c^k - P_{c-1}^k. Let h = g - p phi.
   Its prefix sums are >= 0, so cells of surplus (h > 0) are matched with later cells of deficit,
   first in first out by mass. A draft draws its partner cell uniformly by mass in its own stretch
   of the matching, and moves there with probability (rho - phi) / (phi_partner - phi), which is <=
   1 because rho ascends. Partners exchange equal masses, so a draft's cell is still distributed as
   p, but token j now wins with mass g_j.
3. The draft in the highest cell wins, ties broken uniformly, and the winner y goes through
   Algorithm 1 as a single draft with distribution g: accepted with probability min(1, q(y) / g(y)),
   else a draw from (q - g)+.

With one draft g = p, and this is Algorithm 1. `pmf` and `acceptance` sort; so does `select` for
small vocabularies. For large ones it sorts nothing: tokens whose ratios agree to six bits share a
cell, O(V + cells). It is just as exact, since tokens of a cell may move with different
probabilities; only in the few cells in which rho meets low, high or phi must they share one rho,
which costs 1e-6 of the acceptance (mean over 72 cases with V = 1,024 and 8,192; at most 3e-5; 1e-3
was seen where q is within 1 % of p everywhere).
"""

import functools
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from spectr_jax.transport.base import Choice, product
from spectr_jax.transport.types import AnyArray, Drafts, ExactProbs, IntScalar, Number, Probs, Valid
from spectr_jax.transport.winner import Winner, highest_wins, select_winner, winner_accepted_pmf

SORTED = 256
"""Vocabularies up to this size are sorted, and each token is a cell."""
BITS, OCTAVES = 6, 16
"""Otherwise a cell is 2^-6 of an octave of the ratio, and the lowest and the highest reach to 0 and
infinity."""
MOST = 64
"""Drafts that `acceptance` is made for under jit."""


class Cells(NamedTuple):
    """Tokens grouped by their ratio r = q / p, ascending.

    Attributes:
      p: [C] mass of each cell.
      q: [C]
      bottom: [C] the least ratio that a token of the cell can have.
      top: [C] the largest.
      of_token: [V] int, the cell of each token.
    """

    p: Float[AnyArray, " cells"]
    q: Float[AnyArray, " cells"]
    bottom: Float[AnyArray, " cells"]
    top: Float[AnyArray, " cells"]
    of_token: Int[AnyArray, " vocab"]


class WinnerPmf(NamedTuple):
    """The distribution of the winning draft, by cell, and its parameters.

    Attributes:
      rho: [C] the winner's distribution over p.
      phi: [C] the same if no draft moved.
      low: [] least rho.
      high: [] largest rho.
      rejection: [] D, the least rejection probability.
    """

    rho: Float[AnyArray, " cells"]
    phi: Float[AnyArray, " cells"]
    low: Float[AnyArray, ""]
    high: Float[AnyArray, ""]
    rejection: Float[AnyArray, ""]


class Matching(NamedTuple):
    """Which cells exchange drafts.

    Attributes:
      surplus: [C] what a cell wins beyond its share; negative for a deficit.
      sums: [2, C] prefix sums of the surpluses and of the deficits.
      phi: [C] as in `WinnerPmf`.
    """

    surplus: Float[Array, " cells"]
    sums: Float[Array, "2 cells"]
    phi: Float[Array, " cells"]


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token; see `Plan.select`. Runs in the jitted sampler."""
    return select_winner(win, key, p, q, drafts, valid)


def win(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Winner:
    """Returns the winner, by steps 1 to 3; see `Plan.win`."""
    cells = cells_of(p, q, len(drafts))
    pmf = winner_pmf(cells.p, cells.q, jnp.maximum(jnp.sum(valid), 1))
    rho = token_ratios(p, q, cells.of_token, shared_ratios(cells, pmf))
    return Winner(winning_draft(key, p, drafts, valid, cells, pmf, rho), p * rho)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    cells, winner, moves = _exact(p, q, len(drafts))
    wins = highest_wins(moves[cells.of_token[list(drafts)]])
    return winner_accepted_pmf(q, p * winner.rho[cells.of_token], drafts, wins)


def acceptance(
    p: Float[AnyArray, " vocab"], q: Float[AnyArray, " vocab"], k: Number
) -> Float[AnyArray, ""]:
    """Returns alpha_k = 1 - D, the largest acceptance of all plans; see `Plan.acceptance`.

    Written once, for float64 NumPy and for JAX: there in float32, jittable, for a traced k of at
    most `MOST`, and a little rounded by cells at large V.
    """
    cells = cells_of(p, q, MOST) if isinstance(p, jax.Array) else exact_cells(p, q)
    alpha = 1 - winner_pmf(cells.p, cells.q, k).rejection
    return alpha * (alpha > 0)  # Rounding may leave a little less than 0.


def winner_pmf(p: Float[AnyArray, " cells"], q: Float[AnyArray, " cells"], k: Number) -> WinnerPmf:
    """Returns step 1 of the plan, for the masses p [C] and q [C] of cells in ascending order of q /
    p, and k >= 1 drafts.

    Written once, for float64 NumPy and for JAX.
    """
    xp = p.__array_namespace__()
    head_p = xp.minimum(cumulative(xp, p), 1)  # Above 1 a large power overflows.
    low, high, rejection = _levels(xp, p, q, head_p, k)
    drawn = p > 0
    rho = xp.clip(xp.where(drawn, q / xp.where(drawn, p, 1), high), low, high)
    share = xp.where(drawn, p / xp.where(drawn, head_p, 1), 0)
    log_rest = xp.log1p(
        -xp.where(share < 1, share, 0)
    )  # No neighbouring powers are subtracted: that loses what is small.
    phi = head_p**k * xp.where(share < 1, -xp.expm1(k * log_rest), 1) / xp.where(drawn, p, 1)
    return WinnerPmf(rho, xp.where(drawn, phi, 0), low, high, rejection)


def _levels(
    xp: ModuleType,
    p: Float[AnyArray, " cells"],
    q: Float[AnyArray, " cells"],
    head_p: Float[AnyArray, " cells"],
    k: Number,
) -> tuple[Float[AnyArray, ""], Float[AnyArray, ""], Float[AnyArray, ""]]:
    """Returns the levels between which rho is clipped, and the least rejection probability D.

    Sums of the head and of the tail are kept apart, since a difference of one from 1 loses what is
    small.
    """
    head_q = cumulative(xp, q)
    tail_p, tail_q = (xp.maximum(cumulative(xp, x[::-1])[::-1] - x, 0) for x in (p, q))
    excess = xp.where(
        head_p < 0.5, head_p**k - head_q, xp.expm1(k * xp.log1p(-xp.minimum(tail_p, 0.75))) + tail_q
    )
    at, index = xp.argmax(excess), xp.arange(len(p))
    rejection = xp.maximum(excess[at], 0)
    in_head = (index <= at) & (head_p > 0) & (rejection > 0)
    in_tail = (index >= at) & (tail_p > 0) & (rejection > 0)
    # Each level is where its clipped sum is right; as a function of the number of clipped cells it
    # is extreme there.
    low = xp.min(xp.where(in_head, (rejection + head_q) / xp.where(in_head, head_p, 1), xp.inf))
    high = xp.max(xp.where(in_tail, (tail_q - rejection) / xp.where(in_tail, tail_p, 1), -xp.inf))
    # Nothing to clip: no ratio that counts exceeds k. And low <= 1 <= high <= k, which a tail of
    # rounding errors may break.
    low = xp.where(rejection > 0, xp.minimum(low, 1), 0)
    return low, xp.clip(xp.where(xp.any(in_tail), high, k), 1, k), rejection


def shared_ratios(cells: Cells, winner: WinnerPmf) -> Float[Array, " cells"]:
    """Returns rho [C] of the cells whose tokens share it; -1 for a cell on one side of low, high
    and phi."""
    own = (winner.low <= cells.bottom) & (cells.top <= winner.high)
    own &= (winner.phi <= cells.bottom) | (winner.phi >= cells.top)
    return jnp.where(own, -1, winner.rho)


def token_ratios(
    p: Probs, q: Probs, of_token: Int[Array, " vocab"], shared: Float[Array, " cells"]
) -> Probs:
    """Returns rho [V] of each token: its cell's `shared` ratio, or its own."""
    of_cell = shared[of_token]
    return jnp.where(of_cell < 0, q / jnp.where(p > 0, p, 1), of_cell)


def winning_draft(
    key: PRNGKeyArray,
    p: Probs,
    drafts: Drafts,
    valid: Valid,
    cells: Cells,
    winner: WinnerPmf,
    rho: Probs,
) -> IntScalar:
    """Returns the index of the winning draft, whose token is distributed as p * rho (steps 2 and
    3); consumes `key`."""
    level, move, tie = jax.random.uniform(key, (3, *drafts.shape), p.dtype)
    final = moved(matched(cells, winner), cells.of_token[drafts], rho[drafts], level, move)
    final = jnp.where(valid, final, -1)
    return jnp.argmax(jnp.where(final == jnp.max(final), tie, -1))


def matched(cells: Cells, winner: WinnerPmf) -> Matching:
    """Returns which cells exchange drafts (step 2)."""
    surplus = cells.p * (winner.rho - winner.phi)
    sums = cumulative(jnp, jnp.stack([jnp.maximum(surplus, 0), jnp.maximum(-surplus, 0)]))
    return Matching(surplus, sums, winner.phi)


def moved(
    matching: Matching,
    own: Int[Array, "*#drafts"],
    rho: Float[Array, "*#drafts"],
    level: Float[Array, "*#drafts"],
    move: float | Float[Array, "*#drafts"],
) -> Int[Array, "..."]:
    """Returns the cell of a draft after step 2: that of its partner, or its `own`.

    `level` and `move` are uniform. All may be arrays, which are broadcast.
    """
    surplus = matching.surplus[own]
    gives = surplus >= 0  # A surplus meets a deficit, and the other way round.
    given, taken = matching.sums
    mass = jnp.where(gives, given[own], taken[own]) - level * jnp.abs(surplus)
    # One comparison with all cells is one kernel on a GPU; a CPU has less to do in a binary search.
    search = functools.partial(
        jnp.searchsorted,
        method="scan_unrolled" if jax.default_backend() == "cpu" else "compare_all",
    )
    partner = jnp.where(gives, search(taken, mass), search(given, mass))
    rise = matching.phi.at[partner].get(mode="clip") - matching.phi[own]
    exchanges = (partner < len(matching.phi)) & (
        rise != 0
    )  # Rounding may leave a surplus without a partner.
    toward = (rho - matching.phi[own]) / jnp.where(exchanges, rise, 1)
    return jnp.where(exchanges & (move < toward), partner, own)


def cells_of(p: Probs, q: Probs, most: int) -> Cells:
    """Returns the cells of p [V] and q [V] for at most `most` drafts."""
    return _sorted_cells(p, q) if len(p) <= SORTED else _ratio_cells(p, q, most)


def _sorted_cells(p: Probs, q: Probs) -> Cells:
    """Returns a cell for each ratio; the cells after the last one are empty."""
    ratio = jnp.where(p > 0, q / p, jnp.inf)
    order = jnp.argsort(ratio)
    ascending = ratio[order]
    level = jnp.cumsum(jnp.append(False, ascending[1:] > ascending[:-1]))
    of_token = jnp.zeros_like(order).at[order].set(level)
    levels = jnp.full_like(ratio, jnp.inf).at[of_token].set(ratio)
    mass_p, mass_q = _masses(p, q, of_token, len(p))
    return Cells(mass_p, mass_q, levels, levels, of_token)


def _ratio_cells(p: Probs, q: Probs, most: int) -> Cells:
    """Returns cells by the leading bits of the ratio, which order as ratios do. Ratios above `most`
    are clipped anyway."""
    highest = jnp.float32(1 << (most - 1).bit_length())
    first = _bits(highest) - (OCTAVES << BITS)
    count = (OCTAVES << BITS) + 1
    of_token = jnp.clip(_bits(jnp.where(p > 0, q / p, jnp.inf)) - first, 0, count - 1)
    edges = jax.lax.bitcast_convert_type(
        (jnp.arange(1, count, dtype=jnp.int32) + first) << (23 - BITS), jnp.float32
    )
    mass_p, mass_q = _masses(p, q, of_token, count)
    bottom, top = jnp.pad(edges, (1, 0)), jnp.pad(edges, (0, 1), constant_values=jnp.inf)
    return Cells(mass_p, mass_q, bottom, top, of_token)


def _bits(ratio: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    return jax.lax.bitcast_convert_type(ratio, jnp.int32) >> (23 - BITS)


def _masses(
    p: Probs, q: Probs, of_token: Int[Array, " vocab"], count: int
) -> Float[Array, "2 {count}"]:
    """Returns the masses [2, count] of the cells.

    Adding more than a thousand equal masses one by one loses precision in float32. So they are
    added in parts, and scaled to the right sum.
    """
    parts = -(-len(p) // 1024)
    part = jnp.arange(len(p), dtype=jnp.int32) % parts
    sums = (
        jnp.zeros((2, parts, count), p.dtype)
        .at[:, part, of_token]
        .add(jnp.stack([p, q]), mode="promise_in_bounds")
    )
    masses = jnp.sum(sums, axis=1)
    total = jnp.sum(masses, axis=1, keepdims=True)
    return masses * (jnp.stack([jnp.sum(p), jnp.sum(q)])[:, None] / jnp.where(total > 0, total, 1))


def exact_cells(p: ExactProbs, q: ExactProbs) -> Cells:
    ratio = np.divide(q, p, out=np.full(len(p), np.inf), where=p > 0)
    levels, of_token = np.unique(ratio, return_inverse=True)
    return Cells(np.bincount(of_token, p), np.bincount(of_token, q), levels, levels, of_token)


def _exact(
    p: ExactProbs, q: ExactProbs, k: int | float
) -> tuple[Cells, WinnerPmf, Float[np.ndarray, "cells cells"]]:
    """Returns the cells, the winner's pmf, and the pmf [C, C] of a draft's cell after its move, by
    its own cell."""
    cells = exact_cells(p, q)
    winner = winner_pmf(cells.p, cells.q, k)
    surplus = cells.p * (winner.rho - winner.phi)
    given, taken = np.cumsum(np.maximum(surplus, 0)), np.cumsum(np.maximum(-surplus, 0))
    before = np.maximum(
        given[:, None] - np.maximum(surplus, 0)[:, None], taken - np.maximum(-surplus, 0)
    )
    matched = np.maximum(np.minimum(given[:, None], taken) - before, 0)
    matched[:, surplus >= 0] = matched[surplus <= 0] = 0
    rise = winner.phi - winner.phi[:, None]
    exchanged = np.divide(matched, rise, out=np.zeros_like(matched), where=matched > 0)
    exchanged += exchanged.T
    moves = exchanged / np.where(cells.p > 0, cells.p, 1)[:, None]
    return cells, winner, moves + np.diag(1 - moves.sum(axis=1))


def cumulative(xp: ModuleType, x: Float[AnyArray, "*rows n"]) -> Float[AnyArray, "*rows n"]:
    """Returns the cumulative sum along the last axis; JAX takes two stages for long rows, since its
    scans are slow."""
    width, n = 64, x.shape[-1]
    if xp is np or n <= width:
        return xp.cumsum(x, axis=-1)
    rows = xp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % width)]).reshape(*x.shape[:-1], -1, width)
    within = product(rows, xp.triu(xp.ones((width, width), x.dtype)))
    before = xp.cumsum(within[..., -1], axis=-1) - within[..., -1]
    return (within + before[..., None]).reshape(*x.shape[:-1], -1)[..., :n]
