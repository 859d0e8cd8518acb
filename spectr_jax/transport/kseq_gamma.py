"""K-SEQ at a given gamma (SpecTr, Algorithm 2). Its acceptance is highest at gamma*, as in `kseq`.

The plan is valid for every gamma >= gamma*; a smaller gamma is replaced by gamma*. The default
gamma = k is valid for all p and q and needs no search.
"""

import numbers

import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport import iopt, kseq
from spectr_jax.transport.base import Choice
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.utils.errors import UserError


def select(
    key: PRNGKeyArray,
    p: Probs,
    q: Probs,
    drafts: Drafts,
    valid: Valid,
    *,
    gamma: float | None = None,
) -> Choice:
    """Chooses a token; see `Plan.select`."""
    k = jnp.sum(valid)
    if gamma is None:
        used = jnp.maximum(k, 1).astype(p.dtype)
    else:
        used = jnp.maximum(checked(gamma), kseq.optimal_gamma(p, q, k, len(drafts)))
    return kseq.sequential(key, p, q, drafts, valid, used)


def pmf(
    p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...], *, gamma: float | None = None
) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    return iopt.pmf(p, q, drafts, _stages(p, q, len(drafts), gamma))


def acceptance(p: ExactProbs, q: ExactProbs, k: int, *, gamma: float | None = None) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`."""
    return iopt.acceptance(p, q, _stages(p, q, k, gamma))


def _stages(p: ExactProbs, q: ExactProbs, k: int, gamma: float | None) -> iopt.Stages:
    valid = k if gamma is None else max(checked(gamma), kseq.optimal_gamma_exact(p, q, k))
    return kseq.stages(q, k, valid)


def checked(gamma: float) -> float:
    """Returns `gamma`; raises `UserError` unless it is at least 1, and finite in float32."""
    if not isinstance(gamma, numbers.Real) or not 1 <= gamma <= float(np.finfo(np.float32).max):
        raise UserError(f"gamma={gamma!r}: must be at least 1; give one in [1, k], or None for k")
    return gamma
