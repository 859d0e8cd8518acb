"""The protocol that every model follows, its additions for features, and what our decoders share."""

import types
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.models import cache as cache_lib
from spectr_jax.models.cache import Cache
from spectr_jax.utils import sharding


@runtime_checkable
class Model(Protocol):
    """A decoder that scores any set of new tokens after a committed prefix in one call."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context(self) -> int:
        """Longest supported sequence, in tokens."""
        ...

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache for `batch` sequences of `capacity` slots."""
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
          visible_BxNxM: bool ancestor mask, M = pending + N: entry (i, j) says whether new token i
            sees token j, where the pending tokens of earlier calls come first. A token sees
            itself. Committed tokens are always visible.
          cache: the KV cache of earlier calls; None for a call on whole sequences (M = N), as in
            training.
          pending: static number of pending tokens already in the cache.
          layers: static; runs only the first `layers` layers and the head; None for all. The
            cache rows of the other layers stay as they are.

        Returns:
          logits [B, N, V] float32 of the token after each new token, and the cache with the new
          rows pending (None if there is no cache).
        """
        ...


class ShowsFeatures(Model, Protocol):
    """A target whose last hidden states drafts can see (EAGLE: Li et al., 2024, 2401.15077)."""

    @property
    def features_shown(self) -> int:
        """Width E of a hidden state."""
        ...

    def hidden(
        self,
        tokens_BxN: jax.Array,
        positions_BxN: jax.Array,
        visible_BxNxM: jax.Array,
        cache: Cache | None = None,
        pending: int = 0,
        *,
        also: tuple[int, ...] = (),
    ) -> tuple[jax.Array, Cache]:
        """Returns the last hidden states [B, N, E] float32 instead of `extend`'s logits.

        With `also`, which only drafts with `feature_layers` request, the outputs of these layers
        (from 1) follow: [B, N, (1 + len(also)) * E].
        """
        ...

    def logits_of(self, hidden_BxNxE: jax.Array) -> jax.Array:
        """Returns the head's logits [B, N, V] float32."""
        ...


class SeesFeatures(Model, Protocol):
    """A draft that sees its target's features.

    It has `logits_of` and `hidden` as `ShowsFeatures`. `hidden` also takes `features_BxNxE`: the
    target's hidden state at the token before each new token.
    """

    @property
    def features_seen(self) -> int:
        """Width E of the target's hidden states."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers, from 1, that the draft sees besides the last hidden state."""
        ...


def features_seen(model: Any) -> int:
    """Returns the width of the target features that a draft consumes; 0 if none."""
    return getattr(model, "features_seen", 0)


def feature_layers(model: Any) -> tuple[int, ...]:
    """Returns the target layers that a draft sees besides the last hidden state; empty if none."""
    return getattr(model, "feature_layers", ())


def features_shown(model: Any) -> int:
    """Returns the width E of a hidden state that a target can show to drafts; 0 if none."""
    return getattr(model, "features_shown", 0)


def split_abstract(build: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Returns (graphdef, state of abstract arrays) of the module that `build` makes.

    `build` takes a source of random keys, whose values do not matter. The time to trace an
    `nnx.Rngs` is quadratic in the number of keys, so this source is a plain function.
    """
    rngs = types.SimpleNamespace(params=lambda: jax.random.key(0))
    return nnx.split(nnx.eval_shape(lambda: build(rngs)))


class Decoder(nnx.Module):
    """The base class of our decoders. Cache rows are the keys and values of each layer."""

    config: Any
    blocks: Any
    norm: Any
    logits_of: Any
    _run: Any

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def layers(self) -> int:
        return self.config.layers

    @property
    def features_shown(self) -> int:
        """Width of a hidden state."""
        return self.config.width

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache: rows (keys, values) of each layer, each [B, T, K, D]."""
        config = self.config

        def empty(layer):
            heads = config.of_layer(layer)
            shape = (batch, capacity, heads.kv_heads, heads.head_width)
            rows = cache_lib.zeros(shape, config.dtype)
            return sharding.split(rows, axis=2) if config.shards > 1 else rows

        # One array per layer: slicing stacked layers would copy them in every call.
        rows = tuple((empty(layer), empty(layer)) for layer in range(config.layers))
        return Cache(rows, jnp.zeros(batch, jnp.int32))

    def extend(
        self, tokens_BxN, positions_BxN, visible_BxNxM, cache=None, pending=0, *, layers=None
    ):
        """See `Model.extend`."""
        hidden_BxNxE, cache = self.hidden(
            tokens_BxN, positions_BxN, visible_BxNxM, cache, pending, layers=layers
        )
        return self.logits_of(hidden_BxNxE), cache

    def hidden(
        self,
        tokens_BxN,
        positions_BxN,
        visible_BxNxM,
        cache=None,
        pending=0,
        *,
        layers=None,
        also=(),
        **inputs,
    ):
        """See `ShowsFeatures.hidden`; with `layers`, of the first layers only.

        `inputs` are further arguments of the decoder's `_run`.
        """
        outputs, cache = self._run(
            tokens_BxN, positions_BxN, visible_BxNxM, cache, pending, layers, **inputs
        )
        lower = [outputs[layer - 1] for layer in also]
        return jnp.concatenate([self._shown(outputs[-1]), *lower], axis=-1), cache

    def _shown(self, x_BxNxE):
        """Returns the last hidden states of the output of the last block."""
        return self.norm(x_BxNxE)

    def _run_blocks(
        self,
        run: Callable,
        x_BxNxE,
        visible_BxNxM,
        cache,
        pending,
        layers,
        windows: tuple[int, ...] = (),
    ):
        """Runs the first `layers` blocks; None for all.

        Args:
          run: (index of a block, x, mask [B, N, T], rows, starts [B]) -> (x, new rows).
          x_BxNxE: the input of the first block.
          visible_BxNxM: see `Model.extend`, also for the next arguments.
          windows: number of last visible tokens that each block sees; 0 or empty for all.

        Returns:
          The output of each block, [B, N, E], and the cache with the new rows.
        """
        windows = windows or (0,) * self.layers
        masks = {
            window: cache_lib.mask_and_starts(cache, visible_BxNxM, pending, window)
            for window in set(windows)
        }
        rows = [None] * self.layers if cache is None else list(cache.rows)
        outputs = []
        for index in range(self.layers if layers is None else layers):
            mask_BxNxT, starts_B = masks[windows[index]]
            x_BxNxE, rows[index] = run(index, x_BxNxE, mask_BxNxT, rows[index], starts_B)
            outputs.append(x_BxNxE)
        return outputs, None if cache is None else Cache(tuple(rows), cache.lengths)
