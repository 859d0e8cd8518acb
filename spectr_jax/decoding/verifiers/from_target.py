"""Drafts that are given: each token is drawn from the target, and the walk continues at the draft that is this token.

Drafts that a rule finds, such as `decoding.lookup`, are no draws: given the sequence so far, each has probability 1. Then a
draw from q is exact, and accepts with the probability q of the drafted set, which no exact choice exceeds: the token has
distribution q for each set of drafts, and is in the set with that probability.
"""

import dataclasses

from spectr_jax import transport
from spectr_jax.decoding.verifiers.token_by_token import TokenByToken
from spectr_jax.transport.base import Plan


@dataclasses.dataclass(frozen=True)
class FromTarget(TokenByToken):
    """Verifies drafts of any origin that are functions of the sequence so far. Siblings are distinct."""

    plan: Plan = dataclasses.field(default_factory=lambda: transport.get("naive"), init=False)

    @property
    def rule(self) -> str:
        return GIVEN


GIVEN = "given"
"""The rule of drafts that are not drawn: a `Drafter` finds them."""
