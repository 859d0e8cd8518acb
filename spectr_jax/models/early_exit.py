"""A model's first layers as a model, for self-speculation (Zhang et al., 2024; LayerSkip, 2024)."""

import dataclasses

from spectr_jax.models.base import Model


@dataclasses.dataclass(frozen=True)
class EarlyExit:
    """The first `layers` of `model`, with its final norm and head.

    It uses the model's own cache, and writes its rows of these layers.
    """

    model: Model
    layers: int

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def context(self) -> int:
        return self.model.context

    def init_cache(self, batch, capacity):
        """Returns the cache of the whole model."""
        return self.model.init_cache(batch, capacity)

    def extend(
        self, tokens_BxN, positions_BxN, visible_BxNxM, cache=None, pending=0, *, layers=None
    ):
        """See `Model.extend`. The rows of the other layers are unchanged."""
        layers = self.layers if layers is None else layers
        return self.model.extend(
            tokens_BxN, positions_BxN, visible_BxNxM, cache, pending, layers=layers
        )
