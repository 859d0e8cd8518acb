"""Recursive rejection of drafts without replacement (Yang et al., 2024; Jeon et al., 2024; GSD, ERSD's Algorithm 4).

As `recursive`, but each draft is drawn from p without the drafts before it, renormalised, and tested against that law.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.errors import UserError
from spectr_jax.transport.base import Choice, draw, or_else
from spectr_jax.transport.recursive import residual

DRAFTS = "without_replacement"
LARGEST = 10_000_000
"""Draft sequences that `acceptance` goes through at most."""


def select(key, p, q, drafts, valid) -> Choice:
    """See `Plan.select`; drafts in the order in which they were drawn. Runs in the jitted sampler."""
    accept_key, residual_key = jax.random.split(key)

    def attempt(carry, this):
        rest_p, left, chosen = carry
        draft, usable, uniform = this
        mass, total = jnp.sum(rest_p), jnp.sum(left)
        accepted = usable & (uniform * rest_p[draft] * total < left[draft] * mass)
        rest = or_else(jnp.maximum(left / total - rest_p / mass, 0), left)
        return (
            jnp.where(usable, rest_p.at[draft].set(0), rest_p),
            jnp.where(usable, rest, left),
            jnp.where((chosen < 0) & accepted, draft, chosen),
        ), None

    uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
    (_, left, chosen), _ = jax.lax.scan(attempt, (p, q, jnp.int32(-1)), (drafts, valid, uniforms))
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
        p = without(p, draft)
    return result + none_before * left


def acceptance(p, q, k) -> float:
    """See `Plan.acceptance`: over all sequences of k - 1 drafts, so for small vocabularies.

    Raises:
      UserError: too many of them.
    """
    support = int(np.sum(p > 0))
    if float(support) ** (min(k, support) - 1) > LARGEST:
        raise UserError(
            f"the exact acceptance of k={k} drafts without replacement goes through V^(k-1) = {support}^{k - 1} sequences, "
            f"more than {LARGEST:,}; lower V or k, or measure it with `select`"
        )
    return _acceptance(p, q, k)


def _acceptance(p, q, k: int) -> float:
    if k == 0 or not p.any():
        return 0.0
    overlap, left = np.minimum(p, q).sum(), residual(p, q)
    if k == 1:
        return overlap
    rejected = np.maximum(p - q, 0)
    return overlap + sum(rejected[x] * _acceptance(without(p, x), left, k - 1) for x in np.flatnonzero(rejected).tolist())


def without(p, token: int) -> np.ndarray:
    """p [V] without a token, renormalised; all 0 where nothing is left."""
    rest = np.where(np.arange(len(p)) == token, 0, p)
    return rest / rest.sum() if rest.sum() > 0 else rest
