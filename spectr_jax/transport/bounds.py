"""Distances between p and q, and bounds on the acceptance that any plan can have, in float64."""

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike

from spectr_jax.transport import checks, otm
from spectr_jax.utils.errors import UserError

LARGEST = 5_000_000
"""The most terms of `theorem_1_bound`."""


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """Returns TV(p, q) = sum |p - q| / 2; 1 - TV is the acceptance of Algorithm 1 (SpecTr, section
    4).

    Args:
      p, q: [V] distributions.

    Raises:
      UserError: p or q is not a distribution, or they differ in size.
    """
    p, q = checks.check_distributions(p, q)
    return float(np.abs(p - q).sum() / 2)


def optimal_acceptance(p: ArrayLike, q: ArrayLike, k: int | float) -> float:
    """Returns alpha_k(p, q), the largest acceptance of any plan for k i.i.d. drafts, in O(V log V)
    (see `otm`).

    Args:
      p, q: [V] distributions of drafts and target.
      k: drafts, at least 1.

    Raises:
      UserError: p or q is not a distribution, they differ in size, or k is not a positive integer.
    """
    p, q = checks.check_distributions(p, q)
    return float(otm.acceptance(p, q, checks.check_number(k)))


def harmonic_bound(p: ArrayLike, q: ArrayLike) -> float:
    """Returns sum p q / (p + q), a lower bound on the acceptance of one exponential race (ERSD,
    Lemma 3.1).

    Args:
      p, q: [V] distributions.

    Raises:
      UserError: p or q is not a distribution, or they differ in size.
    """
    p, q = checks.check_distributions(p, q)
    both = p + q
    return float(np.sum(np.divide(p * q, both, out=np.zeros(len(p)), where=both > 0)))


def theorem_1_bound(p: ArrayLike, q: ArrayLike, k: int | float) -> float:
    r"""Returns the bound on alpha_k of SpecTr's Theorem 1, minimised over all subsets Omega_0, for
    small vocabularies.

    $$\alpha_k \le \min_{\Omega_0} \left[\sum_{y \in \Omega_0} \min\left(q(y), 1 - (1 -
    p(y))^k\right) + \sum_{x_1, \dots, x_k} \min\left(\prod_i p(x_i), \sum_{y \in S \setminus
    \Omega_0} q(y)\right)\right], \quad S \text{ the set of } x_1, \dots, x_k$$

    Args:
      p, q: [V] distributions of drafts and target.
      k: drafts, at least 1.

    Raises:
      UserError: there are too many subsets and drafts, p or q is not a distribution, they differ in size,
        or k is not a positive integer.
    """
    p, q = checks.check_distributions(p, q)
    k, V = checks.check_number(k), len(p)
    terms = 2.0**V * math.comb(V + k - 1, k) if V < 1000 else math.inf
    if terms > LARGEST:
        raise UserError(
            f"Theorem 1's bound for {V} tokens and k={k} has {terms:,.0f} terms, more than "
            f"{LARGEST:,}; "
            "lower V or k, or use `optimal_acceptance`, which is exact"
        )
    tuples = list(itertools.combinations_with_replacement(range(V), k))
    counts = np.array([np.bincount(drafts, minlength=V) for drafts in tuples])
    orders = np.array(
        [
            math.factorial(k) / np.prod([math.factorial(c) for c in row if c > 1] or [1])
            for row in counts
        ]
    )
    probabilities = np.prod(p**counts, axis=1)
    single = np.minimum(q, 1 - (1 - p) ** k)
    best = np.inf
    for subset in itertools.product((False, True), repeat=V):
        chosen = np.array(subset)
        absorbed = ((counts > 0) & ~chosen) @ q
        best = min(
            best, single[chosen].sum() + np.sum(orders * np.minimum(probabilities, absorbed))
        )
    return float(best)
