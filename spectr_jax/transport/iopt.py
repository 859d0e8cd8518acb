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
"""

import abc
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from spectr_jax.transport.base import Plan, exact_residual
from spectr_jax.transport.types import ExactProbs

NEGLIGIBLE = 1e-12
"""Subsets whose mass under q is less than this have alpha = 0."""

DraftProbs: TypeAlias = Float[np.ndarray, "*k vocab"]
"""The distribution of each draft [k, V]; with `Stages`, also one distribution [V] for all."""
Subsets: TypeAlias = Bool[np.ndarray, "k vocab"]


class Stages(NamedTuple):
    """A sequential plan.

    Attributes:
      alphas: [k]
      subsets: [k, V] bool, the Omega_i.
    """

    alphas: Float[np.ndarray, " k"]
    subsets: Subsets


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
    """Runs Algorithm 2 until the subsets no longer change (Theorem 3).

    Args:
      ps: [k, V] distribution of each draft.
      q: [V] distribution of the token.
      subsets: [k, V] bool, initial subsets.
      iterations: largest number of iterations; None for no limit.
    """
    done = 0
    while True:
        alphas = best_alphas(ps, q, subsets)
        done += 1
        smaller = subsets & (alphas[:, None] * q * (1 + 1e-9) < ps)
        if done == iterations or np.array_equal(smaller, subsets):
            return Stages(alphas, subsets)
        subsets = smaller


def saturated_subsets(ps: DraftProbs, q: ExactProbs) -> Subsets:
    """Returns the initial subsets {p_i >= alpha q} [k, V] of SpecTr++ (Definition 3).

    alpha solves alpha * sum_i u_(i-1) = 1. If all drafts have one distribution, this is (5), and
    alpha is that of K-SEQ.
    """
    low, high = 0.0, 1.0
    for _ in range(100):
        alpha = (low + high) / 2
        rejected = 1 - np.minimum(ps, alpha * q).sum(axis=1)
        reached = np.cumprod(np.append(1.0, rejected))[:-1]
        low, high = (low, alpha) if alpha * reached.sum() > 1 else (alpha, high)
    return ps >= low * q * (1 - 1e-12)


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
    clipped: Float[np.ndarray, " k"] = np.clip(alphas, 0, most)
    return clipped


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
    """Returns the probability that Algorithm 1's token is a draft.

    Either a draft passes its test, or the residual equals a rejected draft.
    """
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
