"""The best sequential plan of SpecTr++'s form, over all sequences of subsets (SpecTr++, section 5,
"optimal kSEQ").

The search is a branch and bound: one binary variable says whether a token is inside the subset of a
stage, and given those the program is (LP_k). For vocabularies of up to 10 tokens and few drafts.
Analysis only: SciPy's HiGHS on the host, in float64; `select` works through a callback, for tests.
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
"""Binary variables, V * k, that the search may have: more take hours."""


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token; see `Plan.select`. It searches on the host, so it is for tiny
    vocabularies."""
    return select_by_pmf(pmf, key, p, q, drafts, valid)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`.

    Raises:
      UserError: the search would be too large.
    """
    k = len(drafts)
    return iopt.pmf(np.tile(p, (k, 1)), q, drafts, _search(p.tobytes(), q.tobytes(), k))


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """See `Plan.acceptance`.

    Raises:
      UserError: the search would be too large.
    """
    return iopt.acceptance(np.tile(p, (k, 1)), q, _search(p.tobytes(), q.tobytes(), k))


@functools.lru_cache(maxsize=256)
def _search(p_bytes: bytes, q_bytes: bytes, k: int) -> iopt.Stages:
    p, q = np.frombuffer(p_bytes), np.frombuffer(q_bytes)
    if len(p) * k > LARGEST:
        raise UserError(
            f"the search over subsets of {len(p)} tokens for k={k} drafts has {len(p) * k} binary "
            "variables, more than "
            f"{LARGEST}; lower V or k, or use plan 'spectr++'"
        )
    ps = np.tile(p, (k, 1))
    subsets = _branch_and_bound(p, q, k) | (q == 0)
    found = iopt.Stages(iopt.best_alphas(ps, q, subsets), subsets)
    # What the solver's tolerances cost is won back where a plan that is at hand is better.
    start = iopt.iopt(ps, q, iopt.saturated_subsets(ps, q))
    return max(found, start, key=lambda stages: iopt.accept_probability(ps, q, stages))


def _branch_and_bound(p: ExactProbs, q: ExactProbs, k: int) -> Bool[np.ndarray, "k vocab"]:
    """Returns the best subsets [k, V] bool. Variables: u [k], y [k] (alpha_i u_(i-1)), mass w [k,
    V] and inside z [k, V]."""
    import scipy.optimize  # Imported late: decoding solves no programs, and it takes half a second.
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
        before = {i - 1: 1.0} if i else {}  # u_(i-1); u_0 = 1 moves to the bounds.
        one = 0.0 if i else 1.0
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
    with _silenced():
        result = scipy.optimize.milp(
            np.eye(total)[k - 1],
            constraints=scipy.optimize.LinearConstraint(
                scipy.sparse.csr_array(np.array(rows)), lower, upper
            ),
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
    """Silences the lines that HiGHS prints below the level of sys.stdout, whatever its options."""
    sys.stdout.flush()
    saved, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nothing)
