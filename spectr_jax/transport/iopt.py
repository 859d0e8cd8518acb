r"""Sequential plans with a constant and a subset a draft, and their iterative improvement (SpecTr++,
Ahn et al., 2023).

Algorithm 1 accepts draft i with probability a_i, 1 outside the subset Omega_i and alpha_i q / p_i
inside. Given the subsets, the best alphas solve the linear program (LP_k) of Theorem 2, where u_i
is the probability that the first i drafts are rejected and u_0 = 1:

$$\min_{\alpha} u_k \quad \text{with} \quad u_i = u_{i-1} \left(1 - \sum_x p_i(x) a_i(x)\right),
\quad \sum_i u_{i-1} p_i(x) a_i(x) \le q(x) \text{ for all } x.$$

Algorithm 2, iOPT, shrinks the subsets in turn. This is the general form of Appendix B: every draft
may have its own distribution, in float64 and with SciPy's HiGHS. It is for analysis, and the oracle
for what `spectr_plus_plus` solves on the device.

The paper excludes empty subsets with u_i = u_(i-1); everything is accepted there, so u_i = 0, and
that is used here.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from spectr_jax.transport.types import ExactProbs

NEGLIGIBLE = 1e-12
"""Subsets with less mass of q than this keep alpha = 0."""


DraftProbs: TypeAlias = Float[np.ndarray, "k vocab"]
Subsets: TypeAlias = Bool[np.ndarray, "k vocab"]


class Stages(NamedTuple):
    """A sequential plan.

    Attributes:
      alphas: [k]
      subsets: [k, V] bool, the Omega_i.
    """

    alphas: Float[np.ndarray, " k"]
    subsets: Subsets


def iopt(ps: DraftProbs, q: ExactProbs, subsets: Subsets, iterations: int | None = None) -> Stages:
    """Runs Algorithm 2: alternates between the best alphas and smaller subsets until nothing
    changes (Theorem 3).

    Args:
      ps: [k, V] distribution of each draft.
      q: [V]
      subsets: [k, V] bool, to start from.
      iterations: at most; None for no limit.
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
    """Returns the subsets that SpecTr++ starts from (Definition 3), [k, V] bool: {p_i >= alpha q},
    alpha that of K-SEQ.

    For drafts of different distributions alpha solves alpha * sum_i u_(i-1) = 1, which is (5) where
    they are the same.
    """
    low, high = 0.0, 1.0
    for _ in range(100):
        alpha = (low + high) / 2
        rejected = 1 - np.minimum(ps, alpha * q).sum(axis=1)
        reached = np.cumprod(np.append(1.0, rejected))[:-1]
        low, high = (low, alpha) if alpha * reached.sum() > 1 else (alpha, high)
    return ps >= low * q * (1 - 1e-12)


def best_alphas(ps: DraftProbs, q: ExactProbs, subsets: Subsets) -> Float[np.ndarray, " k"]:
    """Returns the alphas [k] of (LP_k), Theorem 2 and Appendix B.2, in u_i = P(the first i drafts
    are rejected)."""
    import scipy.optimize  # Imported late: decoding solves no programs, and it takes half a second.

    k = len(ps)
    inside_p = np.where(subsets, ps, 0).sum(axis=1)
    inside_q = np.where(subsets, q, 0).sum(axis=1)
    most = np.array(
        [
            np.min(p[s & (q > 0)] / q[s & (q > 0)], initial=np.inf)
            for p, s in zip(ps, subsets, strict=True)
        ]
    )
    filled = np.zeros((len(q), k + 1))  # Of each token's q, by u_0 .. u_k.
    usable = inside_q > NEGLIGIBLE
    chain, equal = [], []
    for i in range(k):
        share = np.where(subsets[i], q, 0) / inside_q[i] if usable[i] else np.zeros(len(q))
        filled[:, i] += np.where(subsets[i], share * inside_p[i], ps[i])
        filled[:, i + 1] -= share
        step = np.zeros((2, k + 1))
        step[:, i] = -inside_p[i], inside_p[i] - most[i] * inside_q[i] if usable[i] else inside_p[i]
        step[:, i + 1] = 1, -1
        chain.append(step)
        if not usable[i]:
            equal.append(step[0])
    filled = (
        filled[q > 0] / q[q > 0, None]
    )  # A row each of size 1: the solver's tolerances are absolute.
    rows, bounds = (
        np.concatenate([filled, *chain]),
        np.append(np.ones(len(filled)), np.zeros(2 * k)),
    )
    result = scipy.optimize.linprog(
        np.eye(k)[-1],
        A_ub=rows[:, 1:],
        b_ub=bounds - rows[:, 0],
        A_eq=np.array(equal)[:, 1:] if equal else None,
        b_eq=-np.array(equal)[:, 0] if equal else None,
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if result.status != 0:
        raise RuntimeError(f"HiGHS did not solve (LP_k): {result.message}")
    u = np.append(1.0, np.maximum(result.x, 0))
    ratio = np.divide(u[1:], u[:-1], out=np.zeros(k), where=u[:-1] > 0)
    alphas = np.divide(inside_p - ratio, inside_q, out=np.zeros(k), where=usable & (u[:-1] > 0))
    clipped: Float[np.ndarray, " k"] = np.clip(alphas, 0, most)
    return clipped


def pmf(ps: DraftProbs, q: ExactProbs, drafts: tuple[int, ...], stages: Stages) -> ExactProbs:
    """Returns the distribution [V] of Algorithm 1's token given the drafts."""
    accepted, _, residual = _masses(ps, q, stages)
    result, none_before = np.zeros(len(q)), 1.0
    for i, draft in enumerate(drafts):
        accept = accepted[i, draft] / ps[i, draft]
        result[draft] += none_before * accept
        none_before *= 1 - accept
    return result + none_before * residual


def acceptance(ps: DraftProbs, q: ExactProbs, stages: Stages) -> float:
    """Returns the probability that Algorithm 1's token is a draft: one passes, or the residual hits
    a rejected one."""
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
    """Returns the accepted mass [k, V] of each draft, the probability [k] that it is rejected, and
    the residual [V]."""
    accepted = np.where(stages.subsets, np.minimum(ps, stages.alphas[:, None] * q), ps)
    rejected = np.maximum(1 - accepted.sum(axis=1), 0)
    reached = np.cumprod(np.append(1.0, rejected))[:-1]
    residual = np.maximum(q - reached @ accepted, 0)
    return accepted, rejected, residual / residual.sum() if residual.sum() > 0 else q
