"""SpecTr+: one iteration of SpecTr++'s Algorithm 2 (Ahn et al., 2023, Definition 4).

It uses K-SEQ's subsets with the best alphas for them.
"""

from jaxtyping import PRNGKeyArray

from spectr_jax.transport import spectr_plus_plus
from spectr_jax.transport.base import Choice
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Chooses a token; see `Plan.select`."""
    return spectr_plus_plus.select(key, p, q, drafts, valid, iterations=1)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`."""
    return spectr_plus_plus.pmf(p, q, drafts, iterations=1)


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the exact acceptance; see `Plan.acceptance`."""
    return spectr_plus_plus.acceptance(p, q, k, iterations=1)
