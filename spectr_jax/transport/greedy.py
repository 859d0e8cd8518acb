r"""Greedy drafts, and the optimal plan for them (Hu et al., 2025, arXiv 2502.18779).

The first k - 1 drafts are the likeliest tokens of p, the set H. The last draft is drawn from p',
which is p without H, renormalised. Only this draft is random, and a token of H is always a draft.
So the optimum is Algorithm 1 with p' as the draft distribution, and

$$\alpha = q(H) + \sum_x \min(p'(x), q(x)).$$
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice, draw, or_else, without
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.transport.winner import winner_accepted_pmf

DRAFTS = "greedy"


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Chooses a token; see `Plan.select`. The last valid draft is the random one."""
    accept_key, residual_key = jax.random.split(key)
    index = jnp.arange(len(drafts))
    last = jnp.max(jnp.where(valid, index, -1))
    rest = p.at[jnp.where(valid & (index < last), drafts, len(p))].set(0, mode="drop")
    total, draft = jnp.sum(rest), drafts[last]
    uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
    # Division first: in float32 a product with a small mass may be 0.
    accepted = (last >= 0) & (uniforms[last] * (rest[draft] / total) < q[draft])
    residual = jnp.where((last >= 0) & (total > 0), or_else(jnp.maximum(q - rest / total, 0), q), q)
    token = jnp.where(accepted, draft, draw(residual_key, residual))
    return Choice(token, jnp.any(valid & (drafts == token)))


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    return winner_accepted_pmf(q, without(p, drafts[:-1]), drafts[-1:], np.ones(1))


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`."""
    likeliest = np.argsort(-p, kind="stable")[: k - 1]
    return float(np.minimum(without(p, likeliest), q).sum() + q[likeliest[p[likeliest] > 0]].sum())
