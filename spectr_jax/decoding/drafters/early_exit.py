"""Early exit: the target's first layers draft (Zhang et al., 2024; LayerSkip, 2024)."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from spectr_jax.decoding.drafters import levels
from spectr_jax.decoding.drafters.base import RECALLED, Drafter, Drafts, Sequences, Setup
from spectr_jax.decoding.tree import Keys, checked
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils.errors import UserError


class _FirstLayers(NamedTuple):
    model: Model
    layers: int

    @property
    def context(self) -> int:
        return self.model.context

    def extend(self, *inputs: Any) -> Any:
        return self.model.extend(*inputs, layers=self.layers)


@dataclasses.dataclass(frozen=True)
class EarlyExit(Drafter):
    """Draws from the target's first `layers` layers, with its final norm and head.

    It temporarily uses the target's cache, and writes its rows of these layers.
    """

    draws: ClassVar[bool] = True
    layers: int

    def __post_init__(self) -> None:
        checked(layers=self.layers)

    def check(self, target: Frozen, draft: Frozen | None) -> None:
        """Raises `UserError` unless the target has more layers."""
        if self.layers >= target.layers:
            limit = f"must be less than the target's {target.layers}; give fewer"
            raise UserError(f"layers={self.layers}: {limit}")

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: Any, target_cache: Cache
    ) -> Drafts:
        """See `Drafter.draft`. Consumes `keys_B`."""
        lengths_B = levels.committed_length(sequences.lengths)
        cache = dataclasses.replace(target_cache, lengths=lengths_B)
        model = _FirstLayers(setup.target, self.layers)
        drawn = levels.draw(setup, keys_B, model, sequences, cache, RECALLED)
        return Drafts(
            tokens=drawn.tokens,
            p=drawn.p,
            state=state,
            target_cache=dataclasses.replace(drawn.cache, lengths=target_cache.lengths),
        )
