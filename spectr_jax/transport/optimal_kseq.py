"""Optimal kSEQ: the best sequential plan over all sequences of subsets (SpecTr++, section 5).

A binary variable says whether a token is inside the subset of a stage. Given these variables the
program is (LP_k); a branch and bound searches over them. The plan is for analysis with up to 10
tokens and few drafts: SciPy's HiGHS solves it in float64 on the host.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, PRNGKeyArray

from spectr_jax.transport import iopt
from spectr_jax.transport.base import Choice, select_by_pmf
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.utils.errors import UserError

LARGEST = 40
"""The most binary variables, V * k. More take hours."""


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Chooses a token, for tiny vocabularies; see `Plan.select`."""
    return select_by_pmf(pmf, key, p, q, drafts, valid)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`.

    Raises:
      UserError: the search would be too large.
    """
    k = len(drafts)
    return iopt.pmf(np.tile(p, (k, 1)), q, drafts, _search(p.tobytes(), q.tobytes(), k))


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`.

    Raises:
      UserError: the search would be too large.
    """
    return iopt.acceptance(np.tile(p, (k, 1)), q, _search(p.tobytes(), q.tobytes(), k))


@functools.lru_cache(maxsize=256)
def _search(p_bytes: bytes, q_bytes: bytes, k: int) -> iopt.Stages:
    p, q = np.frombuffer(p_bytes), np.frombuffer(q_bytes)
    if len(p) * k > LARGEST:
        raise UserError(
            f"V={len(p)}, k={k}: the search has {len(p) * k} binary variables, more than "
            f"{LARGEST}; lower V or k, or use plan 'spectr++'"
        )
    ps = np.tile(p, (k, 1))
    subsets = _branch_and_bound(p, q, k) | (q == 0)
    found = iopt.Stages(iopt.best_alphas(ps, q, subsets), subsets)
    # The solver's tolerances can make its plan slightly worse than that of SpecTr++.
    start = iopt.iopt(ps, q, iopt.saturated_subsets(ps, q))
    return max(found, start, key=lambda stages: iopt.accept_probability(ps, q, stages))


def _branch_and_bound(p: ExactProbs, q: ExactProbs, k: int) -> Bool[np.ndarray, "k vocab"]:
    """Returns the best subsets [k, V] bool.

    The variables are u [k], y [k] with y_i = alpha_i u_(i-1), the accepted mass w [k, V], and z
    [k, V], which is 1 for tokens inside a subset.
    """
    import scipy.optimize  # Takes half a second, and decoding solves no programs on the host.
    import scipy.sparse

    V = len(p)
    total = 2 * k + 2 * k * V
    rows, lower, upper = [], [], []

    def add(coefficients: dict[int, float], low: float, high: float) -> None:
        row = np.zeros(total)
        for column, value in coefficients.items():
            row[column] += value
        rows.append(row)
        lower.append(low)
        upper.append(high)

    for i in range(k):
        # The constant u_0 = 1 is not a variable; it is part of the bounds.
        before, one = ({i - 1: 1.0}, 0.0) if i else ({}, 1.0)
        masses = [2 * k + i * V + x for x in range(V)]
        add({i: 1.0, **dict.fromkeys(masses, 1.0), **{c: -v for c, v in before.items()}}, one, one)
        for x in range(V):
            w, z, y, most = masses[x], 2 * k + (k + i) * V + x, k + i, min(p[x], q[x])
            add({w: 1.0, **{c: -p[x] * v for c, v in before.items()}}, -np.inf, p[x] * one)
            add({w: 1.0, z: p[x], **{c: -p[x] * v for c, v in before.items()}}, p[x] * one, np.inf)
            add({w: 1.0, y: -q[x], z: most}, -np.inf, most)
            add({w: 1.0, y: -q[x], z: -q[x]}, -q[x], np.inf)
    for x in range(V):
        add({2 * k + i * V + x: 1.0 for i in range(k)}, -np.inf, q[x])
    constraints = scipy.sparse.csr_array(np.array(rows)), lower, upper
    with _silenced():
        result = scipy.optimize.milp(
            np.eye(total)[k - 1],
            constraints=scipy.optimize.LinearConstraint(*constraints),
            bounds=scipy.optimize.Bounds(0, 1),
            integrality=np.append(np.zeros(total - k * V), np.ones(k * V)),
            options={"mip_rel_gap": 0.0},
        )
    if result.x is None:
        raise RuntimeError(f"HiGHS did not search the subsets: {result.message}")
    inside: Bool[np.ndarray, "k vocab"] = result.x[-k * V :].reshape(k, V) > 0.5
    return inside


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Discards what HiGHS prints to file descriptor 1, whatever its options."""
    sys.stdout.flush()
    saved, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nothing)
