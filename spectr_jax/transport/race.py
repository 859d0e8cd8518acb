r"""Exponential race speculative decoding (ERSD; Kobus and Gunduz, 2025, section 3, Algorithms 2 and
5).

Each token i has a clock e_i ~ Exp(1). In the race of a distribution p it arrives at e_i / p_i, and
the first arrival is a draw from p. The drafts are the first k arrivals of the race of p; the token
is the first arrival of the race of q *with the same clocks*,

$$x_1 = \arg\min_i \frac{e_i}{p_i}, \qquad y = \arg\min_i \frac{e_i}{q_i},$$

so it is a draw from q that does not depend on p, and is often one of the drafts (Gumbel-max with
common random numbers; Poisson functional representation). Nothing is drawn again after a rejection.

The key is the noise: `select` must be given the key that `arrivals` drew the drafts with. The exact
pmf follows from the clocks given the token: if y wins the race of q at time u, token i starts at
r_i u, r = q / p, and then arrives in the race of p at rate p_i, while y arrives at r_y u; and u is
Exp(1).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from spectr_jax.transport.base import Choice
from spectr_jax.transport.enumeration import probability_in_order
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.utils.errors import UserError

DRAFTS = "race"
LARGEST = 1_000
"""The largest vocabulary that `acceptance` takes: it needs V^2 k steps at each point of a
quadrature."""
_X = np.linspace(-4.2, 4.6, 177)
TIMES = np.exp(_X - np.exp(-_X))
WEIGHTS = (_X[1] - _X[0]) * TIMES * (1 + np.exp(-_X)) * np.exp(-TIMES)
"""Double exponential quadrature of functions of u ~ Exp(1), to 1e-12 for sums of exponentials."""


def scores(key: PRNGKeyArray, pmf: Probs) -> Probs:
    """Returns [V] minus the logarithms of arrival times in the race of `pmf`, -inf for never; a key
    fixes the clocks."""
    # Rare tokens win by tiny clocks. The usual uniforms step by 2^-24, too coarse for tokens below
    # 1e-7, which can hold 1e-3 of the mass.
    return jax.random.gumbel(key, pmf.shape, pmf.dtype, mode="high") + jnp.log(pmf)


def arrivals(key: PRNGKeyArray, p: Probs, count: int) -> Int[Array, " {count}"]:
    """Returns the first `count` tokens in the race of p [V], in order; `key` is the one that
    `select` is given."""
    return jax.lax.top_k(scores(key, p), count)[1].astype(jnp.int32)


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token; see `Plan.select`. `key` is the one that drew the drafts."""
    token = jnp.argmax(scores(key, q)).astype(jnp.int32)
    return Choice(token, jnp.any(valid & (drafts == token)))


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`. `drafts` are in order of
    arrival."""
    order = np.array(drafts)
    result: ExactProbs = (
        q * (_drafts_given_winner(p, q, order) @ WEIGHTS) / probability_in_order(p, drafts)
    )
    return result


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance, by `index_pmf`; see `Plan.acceptance`.

    Raises:
      UserError: V is too large for it.
    """
    return float(index_pmf(p, q, k).sum())


def index_pmf(p: ExactProbs, q: ExactProbs, k: int) -> Float[np.ndarray, " {k}"]:
    """Returns R [k], the probability that the token is the first, second, ..., k-th draft (ERSD,
    eq. (3)), in float64.

    Given the clock of the winner, the other tokens are ahead of it in the race of p independently
    of each other; the number of those is Poisson-binomial.

    Raises:
      UserError: V is too large.
    """
    if len(p) > LARGEST:
        raise UserError(
            f"V={len(p)} tokens are more than {LARGEST:,}; measure the acceptance with `select`, "
            "or lower V"
        )
    result = np.zeros(k)
    for x in np.flatnonzero((p > 0) & (q > 0)):
        # Clocks in units of that of x, which is Exp(1): the others lose against x under q; under p,
        # they do or not.
        by_p, by_q = (np.delete(pmf / pmf[x], x) for pmf in (p, q))
        behind = np.exp(-TIMES * np.maximum(by_p, by_q)[:, None])
        ahead = np.exp(-TIMES * by_q[:, None]) * -np.expm1(
            -TIMES * np.maximum(by_p - by_q, 0)[:, None]
        )
        counts = np.zeros((k, len(TIMES)))
        counts[0] = 1
        for this_behind, this_ahead in zip(behind, ahead, strict=True):
            counts[1:] = counts[1:] * this_behind + counts[:-1] * this_ahead
            counts[0] *= this_behind
        result += counts @ WEIGHTS
    return result


def _drafts_given_winner(
    p: ExactProbs, q: ExactProbs, order: Int[np.ndarray, " k"]
) -> Float[np.ndarray, "vocab times"]:
    """Returns the probability [V, U] of these drafts in this order if token y wins the race of q at
    each of the U TIMES."""
    k, winners = len(order), np.arange(len(p))
    starts = np.divide(q, p, out=np.full(len(p), np.inf), where=p > 0)
    place = np.array([order.tolist().index(y) if y in order else k for y in winners])
    state = np.zeros((len(p), len(TIMES), k + 1))
    state[:, :, 0] = 1
    times = np.unique(starts[np.isfinite(starts)])
    for begin, end in zip(times, np.append(times[1:], np.inf), strict=True):
        for y in winners[
            starts == begin
        ]:  # Its own arrival: it must be the next draft, or all must be there already.
            arrived = state[y, :, place[y]].copy()
            state[y] = 0
            state[y, :, min(place[y] + 1, k)] = arrived
        rates = np.where((winners != winners[:, None]) & (starts <= begin), p, 0)
        state = _advance(state, rates, order, end - begin)
    return state[:, :, k]


def _advance(
    state: Float[np.ndarray, "vocab times states"],
    rates: Float[np.ndarray, "vocab vocab"],
    order: Int[np.ndarray, " k"],
    duration: float,
) -> Float[np.ndarray, "vocab times states"]:
    """Drafts arrive in `order` at `rates` [V, V] for `duration`, in units of TIMES; any other
    arrival is the end."""
    k, step = len(order), rates[:, order]
    # The rate at which any token arrives when m drafts have; nothing matters when all have.
    leave = np.stack([np.delete(rates, order[:m], axis=1).sum(axis=1) for m in range(k)], axis=1)
    if duration == np.inf:
        later = np.divide(step, leave, out=np.zeros_like(step), where=leave > 0)
        for m in range(k):
            state[:, :, m + 1] += state[:, :, m] * later[:, m, None]
        return state
    # The exponential of the generator: a series on halved times, squared again. All entries are
    # positive, so that only the diagonal could lose its digits by squaring, and that is known.
    fastest = max(float(leave.max()), 1e-300)
    halvings = max(0, int(np.ceil(np.log2(fastest * duration * TIMES[-1]))))
    time = fastest * duration * TIMES[:, None, None] / 2**halvings
    stays = np.append(leave / fastest, np.zeros((len(leave), 1)), axis=1)[:, None]
    jumps = np.zeros((len(rates), 1, k + 1, k + 1))
    jumps[:, :, range(k), range(k)] = (1 - leave / fastest)[:, None]
    jumps[:, :, range(k), range(1, k + 1)] = (step / fastest)[:, None]
    jumps[:, :, k, k] = 1
    power, term, transition = (
        np.broadcast_to(np.eye(k + 1), jumps.shape),
        np.exp(-time),
        np.zeros(1),
    )
    for n in range(1, 20):
        transition = transition + term * power
        power, term = power @ jumps, term * time / n
    for doubled in range(halvings):
        transition = transition @ transition
        transition[:, :, range(k + 1), range(k + 1)] = np.exp(
            -stays * time[:, :, 0] * 2.0 ** (doubled + 1)
        )
    return (state[:, :, None] @ transition)[:, :, 0]
