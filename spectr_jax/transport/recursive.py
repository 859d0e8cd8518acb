"""Recursive rejection of i.i.d. drafts (SpecInfer's multi-step verification, Miao et al., 2023; SpecTr, section 6).

The first draft goes through Algorithm 1; if it is rejected, so does the next with the residual law (q - p)+, normalised,
in the place of q, and so on.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.transport.base import Choice, draw, or_else


def select(key, p, q, drafts, valid) -> Choice:
    """See `Plan.select`. Runs in the jitted sampler."""
    accept_key, residual_key = jax.random.split(key)

    def attempt(carry, this):
        left, chosen = carry
        draft, usable, uniform = this
        total = jnp.sum(left)
        accepted = usable & (uniform * p[draft] * total < left[draft])
        rest = or_else(jnp.maximum(left / total - p, 0), left)
        return (jnp.where(usable, rest, left), jnp.where((chosen < 0) & accepted, draft, chosen)), None

    uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
    (left, chosen), _ = jax.lax.scan(attempt, (q, jnp.int32(-1)), (drafts, valid, uniforms))
    token = jnp.where(chosen < 0, draw(residual_key, left), chosen)
    return Choice(token, jnp.any(valid & (drafts == token)))


def law(p, q, drafts) -> np.ndarray:
    """See `Plan.law`."""
    result, none_before, left = np.zeros(len(p)), 1.0, q
    for draft in drafts:
        accept = min(1.0, left[draft] / p[draft])
        result[draft] += none_before * accept
        none_before *= 1 - accept
        left = residual(p, left)
    return result + none_before * left


def acceptance(p, q, k) -> float:
    """See `Plan.acceptance`. A rejected draft has no residual, so nothing is accepted by chance."""
    none, left = 1.0, q
    for _ in range(k):
        none *= 1 - np.minimum(p, left).sum()
        left = residual(p, left)
    return 1 - none


def residual(p, q) -> np.ndarray:
    """(q - p)+ [V], normalised, in float64; q itself where nothing is left."""
    rest = np.maximum(q - p, 0)
    return rest / rest.sum() if rest.sum() > 0 else q
