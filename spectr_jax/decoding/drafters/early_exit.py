"""Early exit: the target's first layers draft (Zhang et al., 2024; LayerSkip, 2024)."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

from spectr_jax.decoding.drafters import levels
from spectr_jax.decoding.drafters.base import Drafter, Drafts, Sequences, Setup
from spectr_jax.decoding.tree import Keys, check_positive
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

    It uses the target's cache, and writes the rows of these layers for the tokens that it runs on:
    the last two committed tokens and the inner nodes.
    """

    draws: ClassVar[bool] = True
    layers: int

    def __post_init__(self) -> None:
        check_positive(layers=self.layers)

    def check(self, target: Frozen, draft: Frozen | None) -> None:
        if self.layers >= target.layers:
            limit = f"must be less than the target's {target.layers}; give fewer"
            raise UserError(f"layers={self.layers}: {limit}")

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: Any, target_cache: Cache
    ) -> Drafts:
        cache = Cache(target_cache.rows, levels.cache_lengths(sequences.lengths))
        model = _FirstLayers(setup.target, self.layers)
        tokens, p, cache = levels.draw(setup, keys_B, model, sequences, cache)
        target_cache = Cache(cache.rows, target_cache.lengths)
        return Drafts(tokens=tokens, p=p, state=state, target_cache=target_cache)
