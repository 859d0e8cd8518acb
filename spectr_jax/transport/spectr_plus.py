"""SpecTr+ (Ahn et al., 2023, Definition 4): one iteration of Algorithm 2, K-SEQ's subset with the
best alphas for it."""

from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice
from spectr_jax.transport.spectr_plus_plus import improved, improved_acceptance, improved_pmf
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token; see `Plan.select`. Runs in the jitted sampler."""
    return improved(key, p, q, drafts, valid, iterations=1)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    return improved_pmf(p, q, drafts, iterations=1)


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`."""
    return improved_acceptance(p, q, k, iterations=1)
