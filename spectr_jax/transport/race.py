r"""Exponential races (ERSD; Kobus and Gunduz, 2025, section 3, Algorithms 2 and 5).

Each token i has a clock e_i ~ Exp(1). In the race of a distribution p the token arrives at time
e_i / p_i, and the first arrival is a draw from p. The drafts are the first k arrivals of the race
of p. The token is the first arrival of the race of q *with the same clocks*:

$$x_1 = \arg\min_i \frac{e_i}{p_i}, \qquad y = \arg\min_i \frac{e_i}{q_i}.$$

So the token is a draw from q that does not depend on p, and it is often one of the drafts
(Gumbel-max with common random numbers; Poisson functional representation). A rejection needs no
second draw. `choose` must be given the key that drew the drafts (`rules.RACE`).

The exact pmf follows from the clocks given the token. Let y win the race of q at time u ~ Exp(1).
In the race of p, y arrives at r_y u with r = q / p, and every other token i arrives at rate p_i
from time r_i u on.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from spectr_jax.transport import rules
from spectr_jax.transport.base import Plan
from spectr_jax.transport.draws import log_arrivals
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Scalar, Valid
from spectr_jax.utils.errors import UserError

LARGEST = 1_000
"""The largest vocabulary of `acceptance`, which takes V^2 k steps per quadrature point."""

_X = np.linspace(-4.2, 4.6, 177)
TIMES = np.exp(_X - np.exp(-_X))
WEIGHTS = (_X[1] - _X[0]) * TIMES * (1 + np.exp(-_X)) * np.exp(-TIMES)
"""Double exponential quadrature over u ~ Exp(1), with error 1e-12 for sums of exponentials."""


class Race(Plan):
    """The first arrival of the race of q, with the clocks that drew the drafts."""

    rule = rules.RACE

    def choose(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Scalar:
        return jnp.argmin(log_arrivals(key, q)).astype(jnp.int32)

    def exact_pmf(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
        given_token = _drafts_given_winner(p, q, np.array(drafts)) @ WEIGHTS
        return q * given_token / rules.probability_in_order(p, drafts)

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        return float(index_pmf(p, q, k).sum())


def index_pmf(p: ExactProbs, q: ExactProbs, k: int) -> Float[np.ndarray, " {k}"]:
    """Returns R [k], the probability that the token is the i-th draft (ERSD, eq. (3)), in float64.

    Given the winner's clock, each other token is ahead of it in the race of p independently, so the
    number of tokens ahead is Poisson-binomial.
    """
    if len(p) > LARGEST:
        raise UserError(f"V={len(p)}: is more than {LARGEST:,}; measure with `select`, or lower V")
    result = np.zeros(k)
    for x in np.flatnonzero((p > 0) & (q > 0)):
        # In units in which the clock of x is Exp(1). All others lose to x under q; under p a token
        # may be behind or ahead of x.
        by_p, by_q = (np.delete(pmf / pmf[x], x) for pmf in (p, q))
        behind = np.exp(-TIMES * np.maximum(by_p, by_q)[:, None])
        wins = -np.expm1(-TIMES * np.maximum(by_p - by_q, 0)[:, None])
        ahead = np.exp(-TIMES * by_q[:, None]) * wins
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
    """Returns the probability [V, U] of the drafts in this order, given the winner and its time."""
    k, winners = len(order), np.arange(len(p))
    starts = np.divide(q, p, out=np.full(len(p), np.inf), where=p > 0)
    place = np.array([order.tolist().index(y) if y in order else k for y in winners])
    state = np.zeros((len(p), len(TIMES), k + 1))
    state[:, :, 0] = 1
    times = np.unique(starts[np.isfinite(starts)])
    for begin, end in zip(times, np.append(times[1:], np.inf), strict=True):
        # The arrival of y itself: y must be the next draft, unless all drafts have arrived.
        for y in winners[starts == begin]:
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
    """Returns the state after `duration`, in units of TIMES, of arrivals at `rates` [V, V].

    State m means that the first m drafts of `order` have arrived and no other token has.
    """
    k, step = len(order), rates[:, order]
    # The rate of all arrivals in state m. After the last draft, arrivals no longer matter.
    leave = np.stack([np.delete(rates, order[:m], axis=1).sum(axis=1) for m in range(k)], axis=1)
    if duration == np.inf:
        later = np.divide(step, leave, out=np.zeros_like(step), where=leave > 0)
        for m in range(k):
            state[:, :, m + 1] += state[:, :, m] * later[:, m, None]
        return state
    # The matrix exponential of the generator: a series for a halved time, squared repeatedly. All
    # entries are positive. Squaring loses accuracy only on the diagonal, whose value is known.
    fastest = max(float(leave.max()), 1e-300)
    halvings = max(0, int(np.ceil(np.log2(fastest * duration * TIMES[-1]))))
    time = fastest * duration * TIMES[:, None, None] / 2**halvings
    stays = np.append(leave / fastest, np.zeros((len(leave), 1)), axis=1)[:, None]
    jumps = np.zeros((len(rates), 1, k + 1, k + 1))
    jumps[:, :, range(k), range(k)] = (1 - leave / fastest)[:, None]
    jumps[:, :, range(k), range(1, k + 1)] = (step / fastest)[:, None]
    jumps[:, :, k, k] = 1
    power, term, transition = np.eye(k + 1), np.exp(-time), np.zeros(1)
    for n in range(1, 20):
        transition = transition + term * power
        power, term = power @ jumps, term * time / n
    for doubled in range(halvings):
        transition = transition @ transition
        diagonal = np.exp(-stays * time[:, :, 0] * 2.0 ** (doubled + 1))
        transition[:, :, range(k + 1), range(k + 1)] = diagonal
    return (state[:, :, None] @ transition)[:, :, 0]
