"""A verifier for drafts that no model draws: it draws each token from the target.

The walk continues at the draft that equals the drawn token. Drafts that a `Drafter` finds, such as
`decoding.lookup`, are functions of the sequence so far, so a draw from q is exact. The acceptance
is the probability of the set of drafts under q; no exact verifier has a higher one.
"""

import dataclasses

from spectr_jax import transport
from spectr_jax.decoding.verifiers.token_by_token import TokenByToken
from spectr_jax.transport.base import Plan


@dataclasses.dataclass(frozen=True)
class FromTarget(TokenByToken):
    """Verifies drafts that are functions of the sequence so far. Siblings must be distinct."""

    plan: Plan = dataclasses.field(default_factory=lambda: transport.get("naive"), init=False)

    @property
    def rule(self) -> None:
        return None
