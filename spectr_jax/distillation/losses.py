"""Losses that drafts are trained with: how far a student's distribution is from its teacher's.

The student's distribution p is over the tokens that its head scores. Of the teacher's distribution
q only the likeliest tokens are known; all others are one more outcome of both. Divergences ignore
the probability that q gives to labelled tokens outside the head, because no student can learn it.
They keep q's mass on unlabelled tokens, which may be in the head. Every loss is non-negative, is
for one place, and works under vmap. The acceptance is that of one draft, sum min(p, q) =
1 - TV(p, q) (Leviathan et al., 2023, corollary 3.6).
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from spectr_jax.transport import otm

TINY = 1e-6
HYBRID_DECAY = 3.0
"""How fast `lk_hybrid` moves from KL to total variation as acceptance grows."""


class Place(NamedTuple):
    """What a loss sees at one place.

    Attributes:
      log_p: [L] the student's log-probabilities of the labelled tokens; -inf for tokens that its
        head does not score.
      log_q: [L] the teacher's log-probabilities of the same tokens.
      log_target: [] the student's log-probability of the token that follows in the text; -inf if
        there is none or the head does not score it.
      rest: [] the teacher's probability of tokens without a label that the student may score; None
        for 1 minus that of the labels.
    """

    log_p: jax.Array
    log_q: jax.Array
    log_target: jax.Array
    rest: jax.Array | None = None


def acceptance(place: Place) -> jax.Array:
    """Returns [] the sum of min(p, q) over the labels. Up to the rounding of labels it is a lower
    bound on the acceptance, too low by at most the probability of tokens without a label."""
    return jnp.sum(jnp.minimum(jnp.exp(place.log_p), jnp.exp(place.log_q)))


def optimal_acceptance(place: Place, drafts: int) -> jax.Array:
    """Returns [] a lower bound, from the labels alone, on the acceptance of the exact plan
    (`otm`) with `drafts` i.i.d. drafts."""
    known = jnp.isfinite(place.log_p) & jnp.isfinite(place.log_q)
    p, q = (jnp.where(known, jnp.exp(part), 0) for part in (place.log_p, place.log_q))
    # The rest of p and the rest of q become two separate tokens, so neither is accepted.
    p, q = jnp.append(p, jnp.stack([1 - p.sum(), 0])), jnp.append(q, jnp.stack([0, 1 - q.sum()]))
    return otm.acceptance(jnp.maximum(p, 0), jnp.maximum(q, 0), drafts)


def kl(place: Place) -> jax.Array:
    """Returns [] KL(q, p) (Hinton et al., 2015), the usual loss for drafts."""
    p, q = _outcomes(place)
    return _divergence(q, p)


def reverse_kl(place: Place) -> jax.Array:
    """Returns [] KL(p, q), which seeks the likely tokens of q (DistillSpec: Zhou et al., 2023,
    arXiv 2310.08461)."""
    return _divergence(*_outcomes(place))


def total_variation(place: Place) -> jax.Array:
    """Returns [] 1 - acceptance (DistillSpec). Its gradient vanishes where p is far from q."""
    return 1 - acceptance(place)


def lk(place: Place) -> jax.Array:
    """Returns [] -log(acceptance), whose gradient does not vanish (LK losses: Samarin et al.,
    2026, arXiv 2602.23881)."""
    return -jnp.log(jnp.maximum(acceptance(place), TINY))


def lk_hybrid(place: Place) -> jax.Array:
    """Returns [] a mean of KL and total variation; the weight of the latter grows with the
    acceptance at each place (same paper)."""
    weight = jnp.exp(-HYBRID_DECAY * jax.lax.stop_gradient(acceptance(place)))
    return weight * kl(place) + (1 - weight) * total_variation(place)


def cross_entropy(place: Place) -> jax.Array:
    """Returns [] the cross-entropy of the text's next token, without a teacher; 0 if there is
    none."""
    return -jnp.where(jnp.isfinite(place.log_target), place.log_target, 0)


LOSSES: dict[str, Callable[[Place], jax.Array]] = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
    "cross_entropy": cross_entropy,
}


class _Outcomes(NamedTuple):
    """A distribution over the labels that the student scores, and the rest. Other labels have
    0 as probability and as log-probability."""

    labels: jax.Array
    logs: jax.Array
    rest: jax.Array


def _divergence(first: _Outcomes, second: _Outcomes) -> jax.Array:
    """Returns [] KL(first, second)."""
    of_labels = jnp.sum(first.labels * (first.logs - second.logs))
    return of_labels + first.rest * (jnp.log(first.rest) - jnp.log(second.rest))


def _outcomes(place: Place) -> tuple[_Outcomes, _Outcomes]:
    """Returns p, and q without the labels that the student does not score, over the same outcomes.
    Every rest is positive."""
    # In a vocabulary smaller than `TOP`, the last labels are empty.
    known = jnp.isfinite(place.log_q) & jnp.isfinite(place.log_p)
    log_p, log_q = (jnp.where(known, part, 0) for part in (place.log_p, place.log_q))
    p, q = (jnp.where(known, jnp.exp(part), 0) for part in (log_p, log_q))
    rest = 1 - jnp.sum(jnp.exp(place.log_q)) if place.rest is None else place.rest
    unlabelled = jnp.maximum(rest, TINY)
    # Not 1 - the labels outside the head: they may hold nearly all, and labels are rounded.
    total = q.sum() + unlabelled
    log_q = jnp.where(known, log_q - jnp.log(total), 0)
    return (
        _Outcomes(p, log_p, jnp.maximum(1 - p.sum(), TINY)),
        _Outcomes(q / total, log_q, unlabelled / total),
    )
