"""SpecTr+ (Ahn et al., 2023, Definition 4): one iteration of Algorithm 2, K-SEQ's subset with the best alphas for it."""

import numpy as np

from spectr_jax.transport.base import Choice
from spectr_jax.transport.spectr_plus_plus import improved, improved_acceptance, improved_law


def select(key, p, q, drafts, valid) -> Choice:
    """See `Plan.select`. Runs in the jitted sampler."""
    return improved(key, p, q, drafts, valid, iterations=1)


def law(p, q, drafts) -> np.ndarray:
    """See `Plan.law`."""
    return improved_law(p, q, drafts, iterations=1)


def acceptance(p, q, k) -> float:
    """See `Plan.acceptance`."""
    return improved_acceptance(p, q, k, iterations=1)
