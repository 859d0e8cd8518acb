"""Optimal kSEQ: the best sequential plan over all sequences of subsets (SpecTr++, section 5).

A binary variable says whether a token is inside the subset of a stage. Given these variables the
program is (LP_k); a branch and bound searches over them. The plan is for analysis with up to 10
tokens and few drafts: SciPy's HiGHS solves it in float64 on the host.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Bool

from spectr_jax.transport import iopt
from spectr_jax.transport.base import cached, choose_on_host
from spectr_jax.transport.types import Drafts, ExactProbs, IntScalar, Key, Probs, Valid
from spectr_jax.utils.errors import UserError

LARGEST = 40
"""The largest number of binary variables, V * k. More take hours."""


class OptimalKSeq(iopt.SequentialPlan):
    """The best sequential plan, for tiny vocabularies."""

    def choose(self, key: Key, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> IntScalar:
        return choose_on_host(self, key, p, q, drafts, valid)

    def stages(self, p: ExactProbs, q: ExactProbs, k: int) -> iopt.Stages:
        return _search(p, q, k)


@cached
def _search(p: ExactProbs, q: ExactProbs, k: int) -> iopt.Stages:
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

    The variables are u [k + 1], y [k] with y_i = alpha_i u_(i-1), the accepted mass w [k, V], and
    z [k, V], which is 1 for tokens inside a subset.
    """
    import scipy.optimize  # Takes half a second, and decoding solves no programs on the host.

    V = len(p)
    total = 1 + 2 * k + 2 * k * V
    u, y, w, z = np.split(np.eye(total), np.cumsum([k + 1, k, k * V]))  # A row takes a variable.
    w, z = w.reshape(k, V, total), z.reshape(k, V, total)
    most, p, of_q = np.minimum(p, q), p[:, None], q[:, None]
    limits: list[tuple[Any, Any, Any]] = [(u[0], 1, 1), (w.sum(axis=0), -np.inf, q)]
    for i in range(k):
        limits += [
            (u[i + 1] - u[i] + w[i].sum(axis=0), 0, 0),
            (w[i] - p * u[i], -np.inf, 0),
            (w[i] - p * (u[i] - z[i]), 0, np.inf),
            (w[i] - of_q * y[i] + most[:, None] * z[i], -np.inf, most),
            (w[i] - of_q * (y[i] + z[i]), -q, np.inf),
        ]
    with _silenced():
        result = scipy.optimize.milp(
            u[k],
            constraints=[scipy.optimize.LinearConstraint(*each) for each in limits],
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
    """Discards output to file descriptor 1: no option of HiGHS turns all of it off."""
    sys.stdout.flush()
    saved, nothing = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nothing)
