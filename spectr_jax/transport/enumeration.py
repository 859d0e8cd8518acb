"""Enumeration of all drafts of a small problem: the reference that every plan is tested against."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from spectr_jax.transport.base import Plan
from spectr_jax.transport.types import ExactProbs


def draft_tuples(p: ExactProbs, k: int, rule: str) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yields each sequence of drafts that `rule` can draw from p [V], with its probability.

    Args:
      p: [V] float64.
      k: number of drafts. Distinct drafts are fewer if fewer than k tokens have p > 0.
      rule: as in `Plan.drafts`.
    """
    support = np.flatnonzero(p)
    if rule == "iid":
        for drafts in itertools.product(support.tolist(), repeat=k):
            yield drafts, float(np.prod(p[list(drafts)]))
    elif rule in ("without_replacement", "race"):
        for drafts in itertools.permutations(support.tolist(), min(k, len(support))):
            yield drafts, probability_in_order(p, drafts)
    elif rule == "greedy":
        likeliest = np.argsort(-p, kind="stable")[: min(k, len(support)) - 1].tolist()
        rest = p.copy()
        rest[likeliest] = 0
        for last in np.flatnonzero(rest).tolist():
            yield (*likeliest, last), float(rest[last] / rest.sum())
    else:
        raise ValueError(f"unknown drafting rule {rule!r}")


def probability_in_order(p: ExactProbs, drafts: Sequence[int]) -> float:
    """Returns the probability of drawing `drafts` from p [V] without replacement, in this order."""
    rest, probability = p.copy(), 1.0
    for draft in drafts:
        probability *= p[draft] / rest.sum()  # A running difference from 1 would lose small terms.
        rest[draft] = 0
    return float(probability)


def emitted_pmf(plan: Plan, p: ExactProbs, q: ExactProbs, k: int) -> tuple[ExactProbs, float]:
    """Returns the distribution [V] of the plan's token over all drafts, and its acceptance."""
    emitted, accepted = np.zeros(len(q)), 0.0
    for drafts, probability in draft_tuples(np.asarray(p, float), k, plan.drafts):
        pmf = plan.pmf(p, q, drafts)
        emitted += probability * pmf
        accepted += probability * pmf[list(set(drafts))].sum()
    return emitted, accepted
