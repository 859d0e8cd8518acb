r"""Greedy drafts, and the plan that is optimal for them (Hu et al., 2025, arXiv 2502.18779).

The first k - 1 drafts are the likeliest tokens of p, the set H; the last is drawn from p', which is
p without them, renormalised. Only the last is random, and a token of H is always among the drafts;
so the optimum is Algorithm 1 with p' as the draft distribution, and

$$\alpha = q(H) + \sum_x \min(p'(x), q(x)).$$
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PRNGKeyArray

from spectr_jax.transport.base import Choice, draw, or_else
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid

DRAFTS = "greedy"


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token; see `Plan.select`. The last valid draft is the random one."""
    accept_key, residual_key = jax.random.split(key)
    index = jnp.arange(len(drafts))
    last = jnp.max(jnp.where(valid, index, -1))
    rest = p.at[jnp.where(valid & (index < last), drafts, len(p))].set(0, mode="drop")
    total, draft = jnp.sum(rest), drafts[last]
    uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
    # Divided first: a product with the little that is left may be 0 in float32.
    accepted = (last >= 0) & (uniforms[last] * (rest[draft] / total) < q[draft])
    residual = jnp.where((last >= 0) & (total > 0), or_else(jnp.maximum(q - rest / total, 0), q), q)
    token = jnp.where(accepted, draft, draw(residual_key, residual))
    return Choice(token, jnp.any(valid & (drafts == token)))


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    rest = _rest(p, drafts[:-1])
    residual = np.maximum(q - rest, 0)
    residual = residual / residual.sum() if residual.sum() > 0 else q
    accept = min(1.0, q[drafts[-1]] / rest[drafts[-1]])
    result: ExactProbs = accept * np.eye(len(p))[drafts[-1]] + (1 - accept) * residual
    return result


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`."""
    likeliest = np.argsort(-p, kind="stable")[: k - 1]
    return float(np.minimum(_rest(p, likeliest), q).sum() + q[likeliest[p[likeliest] > 0]].sum())


def _rest(p: ExactProbs, likeliest: tuple[int, ...] | Int[np.ndarray, " likeliest"]) -> ExactProbs:
    rest = p.copy()
    rest[list(likeliest)] = 0
    return rest / rest.sum() if rest.sum() > 0 else rest
