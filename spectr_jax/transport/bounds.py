"""Distances between p and q [V], and bounds on the acceptance of any plan, in float64.

All functions raise `UserError` if p or q is not a distribution, their sizes differ, or k is not a
positive integer.
"""

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike

from spectr_jax.transport import checks, otm
from spectr_jax.utils.errors import UserError

LARGEST = 5_000_000
"""The largest number of terms of `theorem_1_bound`."""


def total_variation(p: ArrayLike, q: ArrayLike) -> float:
    """Returns TV(p, q) = sum |p - q| / 2. Algorithm 1 accepts with 1 - TV (SpecTr, section 4)."""
    p, q = checks.check_distributions(p, q)
    return float(np.abs(p - q).sum() / 2)


def optimal_acceptance(p: ArrayLike, q: ArrayLike, k: int | float) -> float:
    """Returns alpha_k(p, q), the largest acceptance of any plan for k i.i.d. drafts (see `otm`).

    Takes O(V log V) time.
    """
    p, q = checks.check_distributions(p, q)
    return float(otm.acceptance(p, q, checks.check_number(k)))


def harmonic_bound(p: ArrayLike, q: ArrayLike) -> float:
    """Returns sum p q / (p + q), a lower bound on the acceptance of one race (ERSD, Lemma 3.1)."""
    p, q = checks.check_distributions(p, q)
    both = p + q
    return float(np.sum(np.divide(p * q, both, out=np.zeros(len(p)), where=both > 0)))


def theorem_1_bound(p: ArrayLike, q: ArrayLike, k: int | float) -> float:
    r"""Returns the upper bound on alpha_k of SpecTr's Theorem 1, for small vocabularies.

    $$\alpha_k \le \min_{\Omega_0} \left[\sum_{y \in \Omega_0} \min\left(q(y), 1 - (1 -
    p(y))^k\right) + \sum_{x_1, \dots, x_k} \min\left(\prod_i p(x_i), \sum_{y \in S \setminus
    \Omega_0} q(y)\right)\right], \quad S \text{ the set of } x_1, \dots, x_k$$

    The minimum is over all subsets $\Omega_0$ of the vocabulary.
    More than `LARGEST` terms also raise `UserError`.
    """
    p, q = checks.check_distributions(p, q)
    k, V = checks.check_number(k), len(p)
    terms = 2.0**V * math.comb(V + k - 1, k) if V < 1000 else math.inf
    if terms > LARGEST:
        raise UserError(
            f"V={V}, k={k}: the bound has {terms:,.0f} terms, more than {LARGEST:,}; lower V or k, "
            "or use the exact `optimal_acceptance`"
        )
    tuples = itertools.combinations_with_replacement(range(V), k)
    counts = np.array([np.bincount(drafts, minlength=V) for drafts in tuples])
    products = [math.prod(map(math.factorial, row)) for row in counts.tolist()]
    orders = np.array([math.factorial(k) / product for product in products])
    probabilities = np.prod(p**counts, axis=1)
    single = np.minimum(q, 1 - (1 - p) ** k)
    bounds = []
    for subset in itertools.product((False, True), repeat=V):
        absorbed = ((counts > 0) & ~np.array(subset)) @ q
        rest = np.sum(orders * np.minimum(probabilities, absorbed))
        bounds.append(single[np.array(subset)].sum() + rest)
    return float(min(bounds))
