"""k-sequential selection, K-SEQ (SpecTr, Algorithm 2 and Theorem 2).

Drafts are tried in turn, each accepted with probability min(1, q(x) / (gamma p(x))); if none is, the token is drawn
from the residual law (5). The plan is valid for every gamma >= gamma*, where gamma* solves (6),

    1 - (1 - beta)^k = gamma * beta,    beta(gamma) = sum_x min(p(x), q(x) / gamma).

Both sides divided by beta: with S_k(beta) = 1 + (1 - beta) + ... + (1 - beta)^(k-1), the equation reads S_k = gamma and
the residual q - min(p, q / gamma) * S_k. Nothing is divided by what may vanish, k = 1 gives gamma = S = 1 to the last
bit (Algorithm 1), and disjoint supports give gamma = k.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.transport.base import Choice, draw, or_else

BISECTIONS = 24
"""Halvings of [1, k]: as many as float32 has bits. The upper end is used, where the plan is valid."""


def select(key, p, q, drafts, valid) -> Choice:
    """See `Plan.select`. SpecTr, Algorithm 2 at gamma*."""
    accept_key, residual_key = jax.random.split(key)
    k = jnp.sum(valid)
    gamma = _gamma(p, q, k, drafts.shape[0])
    uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
    # u < q / (gamma p) without the division: right for p = 0, and never true for q = 0.
    passes = valid & (uniforms * gamma * p[drafts] < q[drafts])
    shared = jnp.minimum(p, q / gamma)
    residual = jnp.maximum(q - shared * _geometric_sum(jnp.sum(shared), k, drafts.shape[0]), 0)
    token = jnp.where(jnp.any(passes), drafts[jnp.argmax(passes)], draw(residual_key, or_else(residual, q)))
    return Choice(token, jnp.any(valid & (drafts == token)))


def law(p, q, drafts) -> np.ndarray:
    """See `Plan.law`."""
    gamma, _, residual = _exact(p, q, len(drafts))
    result, none_before = np.zeros(len(p)), 1.0
    for draft in drafts:
        accept = min(1.0, q[draft] / (gamma * p[draft]))
        result[draft] += none_before * accept
        none_before *= 1 - accept
    return result + none_before * residual


def acceptance(p, q, k) -> float:
    """See `Plan.acceptance`: p_acc of Theorem 2, and the chance that the residual hits a rejected draft."""
    _, shared, residual = _exact(p, q, k)
    beta = shared.sum()
    rejected_without = np.maximum(1 - beta - (p - shared), 0) ** k  # All rejected, and none of them is x.
    return 1 - (1 - beta) ** k + np.sum(residual * ((1 - beta) ** k - rejected_without))


def accept_probability(p, q, k: int) -> float:
    """p_acc of Theorem 2 at gamma*, in float64: the probability that one of k drafts passes its test."""
    _, shared, _ = _exact(np.asarray(p, float), np.asarray(q, float), k)
    return float(1 - (1 - shared.sum()) ** k)


def _gamma(p, q, k, most: int) -> jax.Array:
    """gamma* for a traced number of drafts `k <= most`, from above. f(gamma) = S_k - gamma falls (Lemma 3)."""

    def halve(_, bracket):
        low, high = bracket
        middle = (low + high) / 2
        above = _geometric_sum(jnp.sum(jnp.minimum(p, q / middle)), k, most) <= middle
        return jnp.where(above, low, middle), jnp.where(above, middle, high)

    one = jnp.ones((), p.dtype)
    return jax.lax.fori_loop(0, BISECTIONS, halve, (one, jnp.maximum(k.astype(p.dtype), one)))[1]


def _geometric_sum(beta, k, most: int) -> jax.Array:
    """S_k(beta) for a traced `k <= most`: k terms, 0 for k = 0."""
    powers = (1 - beta) ** jnp.arange(most, dtype=beta.dtype)
    return jnp.sum(jnp.where(jnp.arange(most) < k, powers, 0))


def _exact(p, q, k: int) -> tuple[float, np.ndarray, np.ndarray]:
    """gamma*, min(p, q / gamma*) and the normalised residual, in float64."""
    low, high = 1.0, float(k)
    for _ in range(100):
        middle = (low + high) / 2
        if _sum_exact(np.minimum(p, q / middle).sum(), k) <= middle:
            high = middle
        else:
            low = middle
    shared = np.minimum(p, q / high)
    residual = np.maximum(q - shared * _sum_exact(shared.sum(), k), 0)
    return high, shared, residual / residual.sum() if residual.sum() > 0 else q


def _sum_exact(beta: float, k: int) -> float:
    return float(np.sum((1 - beta) ** np.arange(k)))
