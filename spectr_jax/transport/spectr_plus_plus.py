r"""SpecTr++: a sequential plan with a constant and a subset for each draft (Ahn et al., 2023).

Drafts are tried in turn (Definition 4). Draft i is accepted with a probability a_i, which is 1
outside the subset Omega_i = {p > tau_i q}:

$$a_i(x) = \alpha_i \frac{q(x)}{p(x)} \text{ for } x \in \Omega_i, \qquad a_i(x) = 1 \text{ for } x
\notin \Omega_i.$$

K-SEQ is the case in which every alpha is 1 / gamma*. Algorithm 2 starts from its subsets and
alternates: the linear program (LP_k) gives the best alphas for the subsets, and the alphas give
smaller subsets, until nothing changes. SpecTr+ is its first iteration.

A subset is a threshold tau_i on s = p / q. So the constraint of a token depends on s alone, and it
tightens with s between two thresholds. At most k + 1 of the V constraints of (LP_k) can bind: one
for the largest s below each threshold, and one for the tokens above all thresholds. The program
then has k variables and about 3 k rows, and `simplex` solves it inside jit. Its variables are
y_i = alpha_i u_(i-1), in which u_i = P(the first i drafts are rejected) is linear; the previous
alphas give a feasible start.

`pmf` and `acceptance` run the same program in float64. `iopt` has the general form with a
distribution for each draft.
"""

import dataclasses
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from spectr_jax.transport import iopt, simplex
from spectr_jax.transport.base import cached, or_else, product
from spectr_jax.transport.draws import draw, uniform
from spectr_jax.transport.kseq import optimal_gamma, optimal_gamma_exact
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Scalar, Valid
from spectr_jax.utils import sharding

LARGEST_ALPHA = 1e3
"""The largest alpha. This limit binds only if Omega_i has less than a thousandth of q."""


class _Stages(NamedTuple):
    alphas: Float[Array, " stages"]
    thresholds: Float[Array, " stages"]


_Carry: TypeAlias = tuple[_Stages, Scalar, Scalar]


@dataclasses.dataclass(frozen=True)
class SpecTrPlusPlus(iopt.SequentialPlan):
    """Algorithm 1 after at most `iterations` of Algorithm 2, which usually stops after 2 to 6."""

    iterations: int = 32

    def choose(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Scalar:
        accept_key, residual_key = jax.random.split(key)
        k, most = jnp.sum(valid), len(drafts)
        alphas, thresholds = _iopt(p, q, optimal_gamma(p, q, k, most), k, most, self.iterations)
        # The stage of a draft is its rank among the valid drafts.
        stage = jnp.maximum(jnp.cumsum(valid) - 1, 0)
        uniforms = uniform(accept_key, drafts.shape)
        p_k, q_k = p[drafts], q[drafts]
        accepted = (p_k <= thresholds[stage] * q_k) | (uniforms * p_k < alphas[stage] * q_k)
        passes = valid & (q_k > 0) & accepted

        def accept(i: Scalar, carry: tuple[Probs, Scalar]) -> tuple[Probs, Scalar]:
            left, reached = carry
            accepted = jnp.where(p <= thresholds[i] * q, p, jnp.minimum(p, alphas[i] * q)) * (i < k)
            return left - reached * accepted, reached * jnp.maximum(1 - jnp.sum(accepted), 0)

        left, _ = jax.lax.fori_loop(0, most, accept, (q, jnp.ones((), p.dtype)))
        residual = or_else(jnp.maximum(left, 0), q)
        return jnp.where(jnp.any(passes), drafts[jnp.argmax(passes)], draw(residual_key, residual))

    def stages(self, p: ExactProbs, q: ExactProbs, k: int) -> iopt.Stages:
        return _stages(p, q, k, self.iterations)


@dataclasses.dataclass(frozen=True)
class SpecTrPlus(SpecTrPlusPlus):
    """One iteration of Algorithm 2: K-SEQ's subsets with the best alphas for them."""

    iterations: int = dataclasses.field(default=1, init=False)


@cached
def _stages(p: ExactProbs, q: ExactProbs, k: int, iterations: int) -> iopt.Stages:
    """Returns the stages that `choose` uses, computed in float64 by the same code."""
    with jax.enable_x64(True):
        gamma = optimal_gamma_exact(p, q, k)
        most = -(-k // 8) * 8  # All k up to 8 share one program.
        solved = _jitted_iopt(jnp.asarray(p), jnp.asarray(q), gamma, k, most, iterations)
        alphas, thresholds = (np.asarray(x)[:k] for x in solved)
    return iopt.Stages(alphas, p > thresholds[:, None] * q)


def _iopt(
    p: Probs, q: Probs, gamma: Scalar, k: Scalar, most: int, iterations: int | Scalar
) -> _Stages:
    """Runs Algorithm 2 for a traced k <= `most`; stages after the k-th have no effect."""
    tolerance = simplex.tolerance(p.dtype)
    active = jnp.arange(most) < k
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1), jnp.inf)

    def improve(carry: _Carry) -> _Carry:
        stages, _, done = carry
        alphas = _best_alphas(p, q, ratio, stages, active)
        raised = jnp.maximum(stages.thresholds, alphas * (1 + tolerance))
        thresholds = jnp.where(active, raised, -jnp.inf)
        both = jnp.stack([thresholds, stages.thresholds])[..., None]
        sizes = jnp.sum(ratio > both, axis=2)
        same = jnp.all(sizes[0] == sizes[1])
        # The last alphas are the best for the subsets before the change, so those subsets are kept.
        last = same | (done + 1 == iterations)
        return _Stages(alphas, jnp.where(last, stages.thresholds, thresholds)), ~same, done + 1

    alpha = jnp.where(active, 1 / gamma, 0).astype(p.dtype)
    start = _Stages(alpha, jnp.where(active, alpha * (1 - tolerance), -jnp.inf))
    carry = start, jnp.bool_(True), jnp.int32(0)

    def improves(carry: _Carry) -> Scalar:
        return sharding.over_groups(carry[1] & (carry[2] < iterations))

    return jax.lax.while_loop(improves, improve, carry)[0]


_jitted_iopt = jax.jit(_iopt, static_argnums=4)


def _best_alphas(
    p: Probs, q: Probs, ratio: Probs, stages: _Stages, active: Bool[Array, " stages"]
) -> Float[Array, " stages"]:
    """Returns the alphas [K] of (LP_k) for the subsets of `stages`, starting from its alphas.

    Solves (LP_k) for y [K] >= 0: minimises u_K = slope[-1] @ y + constant[-1] under
    `rows @ y <= bounds`.
    """
    inside = ratio > stages.thresholds[:, None]
    inside_p = jnp.where(active, jnp.sum(jnp.where(inside, p, 0), axis=1), 1)
    inside_q = jnp.where(active, jnp.sum(jnp.where(inside, q, 0), axis=1), 0)
    cap = jnp.minimum(jnp.min(jnp.where(inside, ratio, jnp.inf), axis=1), LARGEST_ALPHA) * active
    nearest = jnp.max(jnp.where(inside | (q == 0), 0, ratio), axis=1)

    # u_i = slope_i @ y + constant_i for i = 0 .. K, and the y of the given alphas.
    K = len(cap)
    affine, start, u = [jnp.zeros(K + 1, p.dtype).at[K].set(1)], [], jnp.ones((), p.dtype)
    for i, alpha in enumerate(jnp.minimum(stages.alphas, cap)):
        affine.append((inside_p[i] * affine[i]).at[i].add(-inside_q[i]))
        start.append(alpha * u)
        u = jnp.maximum(inside_p[i] * u - inside_q[i] * start[i], 0)
    slope, constant, y = jnp.stack(affine)[:, :K], jnp.stack(affine)[:, K], jnp.stack(start)

    # The filled part of a token: y_i if it is inside the subset, ratio * u_(i-1) if it is outside.
    out = (nearest[:, None] <= stages.thresholds) * nearest[:, None]
    fill = jnp.where(out > 0, 0, 1) + product(out, slope[:-1])
    identity = jnp.eye(K, dtype=p.dtype)
    rows = jnp.concatenate([identity - cap[:, None] * slope[:-1], fill, jnp.ones((1, K), p.dtype)])
    above_all = jnp.any((ratio > jnp.max(stages.thresholds)) & (q > 0))
    total = jnp.where(above_all, 1, LARGEST_ALPHA)[None]
    bounds = jnp.concatenate([cap * constant[:-1], 1 - product(out, constant[:-1]), total])

    filled = product(rows, y)
    change = simplex.maximise(
        jnp.concatenate([-slope[-1], slope[-1]]),
        jnp.block([[rows, -rows], [-identity, identity]]),
        jnp.concatenate([jnp.maximum(bounds - filled, 0), y]),
    )
    found = jnp.maximum(y + change[:K] - change[K:], 0)
    # Rounding can make the result infeasible or worse; then the feasible start is kept.
    limits = jnp.maximum(bounds, filled) + simplex.tolerance(p.dtype)
    better = product(slope[-1], found) <= product(slope[-1], y)
    y = jnp.where(jnp.all(product(rows, found) <= limits) & better, found, y)
    u = (constant + product(slope, y))[:-1]
    return jnp.minimum(jnp.where(u > 0, y / jnp.where(u > 0, u, 1), 0), cap)
