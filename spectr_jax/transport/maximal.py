"""Maximal coupling of one draft and the target (SpecTr, Algorithm 1; speculative decoding).

The draft x is accepted with probability min(1, q(x) / p(x)), else the token is drawn from (q - p)+, normalised. With
several drafts only the first valid one is used.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.transport.base import Choice, draw, or_else


def select(key, p, q, drafts, valid) -> Choice:
    """See `Plan.select`. SpecTr, Algorithm 1."""
    accept_key, residual_key = jax.random.split(key)
    first = jnp.argmax(valid)
    draft = drafts[first]
    uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
    # u < q / p without the division: right for p = 0, and never true for q = 0.
    accepted = valid[first] & (uniforms[first] * p[draft] < q[draft])
    residual = jnp.where(valid[first], or_else(jnp.maximum(q - p, 0), q), q)
    token = jnp.where(accepted, draft, draw(residual_key, residual))
    return Choice(token, jnp.any(valid & (drafts == token)))


def law(p, q, drafts) -> np.ndarray:
    """See `Plan.law`."""
    residual = np.maximum(q - p, 0)
    residual = residual / residual.sum() if residual.sum() > 0 else q
    accept = min(1.0, q[drafts[0]] / p[drafts[0]])
    return accept * np.eye(len(p))[drafts[0]] + (1 - accept) * residual


def acceptance(p, q, k) -> float:
    """See `Plan.acceptance`: 1 - TV(p, q) from the first draft, and the residual may hit one of the k - 1 others."""
    overlap = np.minimum(p, q).sum()
    return overlap + np.sum(np.maximum(q - p, 0) * (1 - (1 - p) ** (k - 1)))
