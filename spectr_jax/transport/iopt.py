r"""Sequential plans with a constant and a subset per draft, and iOPT (SpecTr++, Ahn et al., 2023).

Algorithm 1 accepts draft i with probability a_i, which is 1 outside the subset Omega_i and
alpha_i q / p_i inside. Given the subsets, the best alphas solve the linear program (LP_k) of
Theorem 2, where u_i is the probability that the first i drafts are rejected, and u_0 = 1:

$$\min_{\alpha} u_k \quad \text{with} \quad u_i = u_{i-1} \left(1 - \sum_x p_i(x) a_i(x)\right),
\quad \sum_i u_{i-1} p_i(x) a_i(x) \le q(x) \text{ for all } x.$$

Algorithm 2, iOPT, alternates between these alphas and smaller subsets. This file has the general
form of Appendix B, in which each draft may have its own distribution. It uses float64 and SciPy's
HiGHS, for analysis and as the reference for `spectr_plus_plus`.

For an empty subset the paper sets u_i = u_(i-1). But there the draft is always accepted, so this
file uses u_i = 0.

Optimal kSEQ (SpecTr++, section 5) is the best such plan over all sequences of subsets. A binary
variable says whether a token is inside the subset of a draft; HiGHS's branch and bound searches
over them.
"""

import abc
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from spectr_jax.transport.base import Plan, cached, exact_residual
from spectr_jax.transport.types import ExactProbs
from spectr_jax.utils.errors import UserError

NEGLIGIBLE = 1e-12
"""Subsets whose mass under q is less than this have alpha = 0."""

LARGEST = 40
"""The largest number of binary variables of `optimal_kseq`, V * k. More take hours."""

DraftProbs: TypeAlias = Float[np.ndarray, "*k vocab"]
"""The distribution of each draft [k, V]; with `Stages`, also one distribution [V] for all."""
Subsets: TypeAlias = Bool[np.ndarray, "k vocab"]


class Stages(NamedTuple):
    """The constants and subsets of a sequential plan."""

    alphas: Float[np.ndarray, " k"]
    subsets: Subsets  # The Omega_i.


class SequentialPlan(Plan):
    """A plan that tries the drafts in turn. A subclass defines `choose` and `stages`."""

    @abc.abstractmethod
    def stages(self, p: ExactProbs, q: ExactProbs, k: int) -> Stages:
        """Returns the stages for k drafts from p [V], in float64."""

    def exact_pmf(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
        return pmf(p, q, drafts, self.stages(p, q, len(drafts)))

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        return acceptance(p, q, self.stages(p, q, k))


def iopt(ps: DraftProbs, q: ExactProbs, subsets: Subsets, iterations: int | None = None) -> Stages:
    """Runs Algorithm 2 from `subsets` until they no longer change, or for `iterations` (Theorem 3)."""
    for done in itertools.count(1):
        alphas = best_alphas(ps, q, subsets)
        smaller = subsets & (alphas[:, None] * q * (1 + 1e-9) < ps)
        if done == iterations or np.array_equal(smaller, subsets):
            break
        subsets = smaller
    return Stages(alphas, subsets)


def saturated_subsets(ps: DraftProbs, q: ExactProbs) -> Subsets:
    """Returns the initial subsets {p_i >= alpha q} [k, V] of SpecTr++ (Definition 3)."""
    return ps >= saturating_alpha(ps, q, len(ps)) * q * (1 - 1e-12)


def saturating_alpha(ps: DraftProbs, q: ExactProbs, k: int) -> float:
    """Returns the alpha that solves alpha * sum_i u_(i-1) = 1, by bisection.

    If all drafts have one distribution, this is (5), and alpha is the 1 / gamma* of K-SEQ.
    """
    low, high = 0.0, 1.0
    for _ in range(100):
        alpha = (low + high) / 2
        rejected = np.broadcast_to(1 - np.minimum(ps, alpha * q).sum(axis=-1), k)
        reached = np.cumprod(np.append(1.0, rejected))[:-1]
        low, high = (low, alpha) if alpha * reached.sum() > 1 else (alpha, high)
    return low


def best_alphas(ps: DraftProbs, q: ExactProbs, subsets: Subsets) -> Float[np.ndarray, " k"]:
    """Returns the alphas [k] of (LP_k) (Theorem 2, Appendix B.2), solved in the variables u_i."""
    k = len(ps)
    inside_p, inside_q = (np.where(subsets, pmf, 0).sum(axis=1) for pmf in (ps, q))
    most = np.divide(ps, q, out=np.full(ps.shape, np.inf), where=subsets & (q > 0)).min(axis=1)
    usable = inside_q > NEGLIGIBLE
    # Rows of coefficients of u_0 .. u_k. `decrease` is alpha_i u_(i-1) inside_q_i.
    before, after = np.eye(k + 1)[:-1], np.eye(k + 1)[1:]
    decrease = inside_p[:, None] * before - after
    largest = np.multiply(most, inside_q, out=np.zeros(k), where=usable)[:, None] * before
    share = np.where(subsets & usable[:, None], q, 0) / np.where(usable, inside_q, 1)[:, None]
    filled = share.T @ decrease + np.where(subsets, 0, ps).T @ before
    filled = filled[q > 0] / q[q > 0, None]  # Rows of one scale: HiGHS's tolerances are absolute.
    rows = np.concatenate([filled, -decrease, decrease - largest])
    bounds = np.append(np.ones(len(filled)), np.zeros(2 * k))
    u = np.append(1.0, minimise(np.eye(k)[-1], rows[:, 1:], bounds - rows[:, 0]))
    ratio = np.divide(u[1:], u[:-1], out=np.zeros(k), where=u[:-1] > 0)
    alphas = np.divide(inside_p - ratio, inside_q, out=np.zeros(k), where=usable & (u[:-1] > 0))
    return np.clip(alphas, 0, most)


def minimise(cost: Any, rows: Any, bounds: Any) -> Any:
    """Returns the x [n] >= 0 with `rows @ x <= bounds` and the smallest `cost @ x`, by HiGHS.

    `rows` [m, n] may be sparse.
    """
    import scipy.optimize  # Takes half a second, and decoding solves no programs on the host.

    options = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    result = scipy.optimize.linprog(cost, rows, bounds, method="highs", options=options)
    if result.status != 0:
        raise RuntimeError(f"HiGHS did not solve the linear program: {result.message}")
    return np.maximum(result.x, 0)


def pmf(ps: DraftProbs, q: ExactProbs, drafts: tuple[int, ...], stages: Stages) -> ExactProbs:
    """Returns the distribution [V] of Algorithm 1's token given the drafts."""
    accepted, _, residual = _masses(ps, q, stages)
    ps, result, none_before = np.broadcast_to(ps, accepted.shape), np.zeros(len(q)), 1.0
    for i, draft in enumerate(drafts):
        accept = accepted[i, draft] / ps[i, draft]
        result[draft] += none_before * accept
        none_before *= 1 - accept
    return result + none_before * residual


def acceptance(ps: DraftProbs, q: ExactProbs, stages: Stages) -> float:
    """Returns the probability that Algorithm 1's token is a draft, by a test or as the residual."""
    accepted, rejected, residual = _masses(ps, q, stages)
    none = np.prod(rejected)
    none_without = np.prod(np.maximum(rejected[:, None] - (ps - accepted), 0), axis=0)
    return float(1 - none + np.sum(residual * (none - none_without)))


def accept_probability(ps: DraftProbs, q: ExactProbs, stages: Stages) -> float:
    """Returns the probability that a draft passes its test, 1 minus the transport cost (2)."""
    return float(1 - np.prod(_masses(ps, q, stages)[1]))


def _masses(
    ps: DraftProbs, q: ExactProbs, stages: Stages
) -> tuple[DraftProbs, Float[np.ndarray, " k"], ExactProbs]:
    """Returns accepted masses [k, V], rejection probabilities [k], and the residual [V]."""
    accepted = np.where(stages.subsets, np.minimum(ps, stages.alphas[:, None] * q), ps)
    rejected = np.maximum(1 - accepted.sum(axis=1), 0)
    reached = np.cumprod(np.append(1.0, rejected))[:-1]
    return accepted, rejected, exact_residual(reached @ accepted, q)


class OptimalKSeq(SequentialPlan):
    """Optimal kSEQ: the best sequential plan, for up to 10 tokens and few drafts."""

    def stages(self, p: ExactProbs, q: ExactProbs, k: int) -> Stages:
        return _search(p, q, k)


@cached
def _search(p: ExactProbs, q: ExactProbs, k: int) -> Stages:
    if len(p) * k > LARGEST:
        raise UserError(
            f"V={len(p)}, k={k}: the search has {len(p) * k} binary variables, more than "
            f"{LARGEST}; lower V or k, or use plan 'spectr++'"
        )
    ps = np.tile(p, (k, 1))
    subsets = _branch_and_bound(p, q, k) | (q == 0)
    solved = Stages(best_alphas(ps, q, subsets), subsets)
    # The solver's tolerances can make its plan slightly worse than that of SpecTr++.
    start = iopt(ps, q, saturated_subsets(ps, q))
    return max(solved, start, key=lambda stages: accept_probability(ps, q, stages))


def _branch_and_bound(p: ExactProbs, q: ExactProbs, k: int) -> Subsets:
    """Returns the best subsets [k, V] bool.

    The variables are u [k + 1], y [k] with y_i = alpha_i u_(i-1), the accepted mass w [k, V], and
    z [k, V], which is 1 for tokens inside a subset.
    """
    import scipy.optimize

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
            constraints=[scipy.optimize.LinearConstraint(*limit) for limit in limits],
            bounds=scipy.optimize.Bounds(0, 1),
            integrality=np.append(np.zeros(total - k * V), np.ones(k * V)),
            options={"mip_rel_gap": 0.0},
        )
    if result.x is None:
        raise RuntimeError(f"HiGHS did not search the subsets: {result.message}")
    return result.x[-k * V :].reshape(k, V) > 0.5


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
