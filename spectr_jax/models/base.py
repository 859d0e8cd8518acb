"""The protocol that every model follows; decoding and training know nothing else of a model."""

from typing import Protocol

import jax

from spectr_jax.models.cache import Cache


class Model(Protocol):
    """A decoder that scores any set of new tokens after a committed prefix, in one call."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int:
        """The longest sequence, in tokens, that the model was built for."""
        ...

    @property
    def layers(self) -> int:
        """The number of layers, for early exit."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache of `batch` sequences with `capacity` slots each."""
        ...

    def extend(
        self,
        tokens_BxN: jax.Array,
        positions_BxN: jax.Array,
        visible_BxNxM: jax.Array,
        cache: Cache | None = None,
        pending: int = 0,
        *,
        layers: int | None = None,
    ) -> tuple[jax.Array, Cache]:
        """Runs the model on new tokens.

        Args:
          tokens_BxN: int32 new tokens.
          positions_BxN: int32 position of each in its sequence; siblings in a tree share one.
          visible_BxNxM: bool ancestor mask, M = pending + N: entry (i, j) says that new token i sees token j, itself
            included; j counts the pending tokens of earlier calls first. Committed tokens are always visible.
          cache: the KV cache of earlier calls; None for a call on whole sequences (M = N), as in training.
          pending: static number of pending tokens already in the cache.
          layers: static; run only this number of first layers, and the head; None for all. Cache rows of the others are
            passed on as they are.

        Returns:
          logits [B, N, V] float32 of the token after each new token, and the cache with the new rows pending (None if
          there is no cache).
        """
        ...
