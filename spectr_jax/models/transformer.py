"""The decoder-only transformer of the LM1B ladder, in Flax NNX.

Pre-LN, GELU, sinusoidal positions, untied output, as in Flax's LM1B example; the 97M and 6M shapes
are those of Leviathan et al. (2023), the 2M and 20M halve and double the 6M's (SpecTr, appendix F).

Shape suffixes: B sequences, N new tokens, M pending and new tokens, T slots, E width, F MLP width,
H heads, D head width, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models import cache as cache_lib
from spectr_jax.models.cache import Cache
from spectr_jax.models.layers.attention import attention
from spectr_jax.models.layers.dense import dense_layer
from spectr_jax.models.layers.norms import LayerNorm
from spectr_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder. `dtype` is that of the factors of its matrix products and of its
    cache; sums, norms and residuals are float32, and so are parameters in training. The last three
    fields are for GPT-2's family (`gpt2.py`).

    Raises:
      UserError: the heads do not divide the width, or it is odd and positions are sinusoidal.
    """

    layers: int
    width: int
    mlp: int
    heads: int
    vocab_size: int = 8192
    context: int = 128
    dropout: float = 0.0
    dtype: str = "float32"
    norm_epsilon: float = 1e-6
    attention_bias: bool = False
    learned_positions: bool = False

    def __post_init__(self):
        if self.heads < 1 or self.width % self.heads:
            raise UserError(
                f"width={self.width} is not a multiple of heads={self.heads}; change one"
            )
        if self.width % 2 and not self.learned_positions:
            raise UserError(
                f"width={self.width} is odd, and sinusoidal positions are of an even width; change "
                "it by one"
            )


LADDER = {
    "draft_2m": TransformerConfig(layers=1, width=128, mlp=512, heads=2),
    "draft_6m": TransformerConfig(layers=2, width=256, mlp=1024, heads=4),
    "draft_20m": TransformerConfig(layers=4, width=512, mlp=2048, heads=8),
    "target_97m": TransformerConfig(layers=12, width=768, mlp=3072, heads=12),
}


def sinusoidal_table(length: int, width: int) -> np.ndarray:
    """Positions [length, width] of Vaswani et al. (2017): sines in the first half, cosines in the
    second."""
    half = width // 2
    scale = np.exp(-math.log(10_000.0) * np.arange(half) / max(half - 1, 1))
    angles = np.arange(length)[:, None] * scale
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Block(nnx.Module):
    """Self-attention and MLP, each after a layer norm and with a residual connection."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        linear = functools.partial(dense_layer, dtype=dtype, rngs=rngs)
        self.heads = config.heads
        self.dtype = dtype
        self.norm_attention = LayerNorm(config.width, config.norm_epsilon)
        self.qkv = linear(
            config.width,
            3 * config.width,
            use_bias=config.attention_bias,
            kernel_init=_split_init(3),
        )
        self.out = linear(config.width, config.width, use_bias=config.attention_bias)
        self.norm_mlp = LayerNorm(config.width, config.norm_epsilon)
        self.up = linear(config.width, config.mlp)
        self.down = linear(config.mlp, config.width)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BxNxE, mask_BxNxT, rows, starts_B, dropout_key):
        """Runs the block; `rows` are this layer's cached (keys, values), each [B, T, H, D], or
        None."""
        keys = [None, None] if dropout_key is None else list(jax.random.split(dropout_key))
        attended_BxNxE, rows = self._attend(
            self.norm_attention(x_BxNxE), mask_BxNxT, rows, starts_B
        )
        x_BxNxE = x_BxNxE + self._drop(attended_BxNxE, keys[0])
        hidden_BxNxF = jax.nn.gelu(self.up(self.norm_mlp(x_BxNxE)))
        return x_BxNxE + self._drop(self.down(hidden_BxNxF), keys[1]), rows

    def _attend(self, x_BxNxE, mask_BxNxT, rows, starts_B):
        B, N, E = x_BxNxE.shape
        q_BxNxHxD, k_BxNxHxD, v_BxNxHxD = (
            part.reshape(B, N, self.heads, E // self.heads).astype(self.dtype)
            for part in jnp.split(self.qkv(x_BxNxE), 3, axis=-1)
        )
        if rows is None:
            k_BxTxHxD, v_BxTxHxD = k_BxNxHxD, v_BxNxHxD
        else:
            keys = cache_lib.write(rows[0], k_BxNxHxD, starts_B)
            values = cache_lib.write(rows[1], v_BxNxHxD, starts_B)
            k_BxTxHxD, v_BxTxHxD, rows = (
                cache_lib.read(keys),
                cache_lib.read(values),
                (keys, values),
            )
        mixed_BxNxHxD = attention(q_BxNxHxD, k_BxTxHxD, v_BxTxHxD, mask_BxNxT)
        return self.out(mixed_BxNxHxD.reshape(B, N, E)), rows

    def _drop(self, x, key):
        return self.dropout(x, deterministic=key is None, rngs=key)


class Transformer(nnx.Module):
    """A decoder that follows the `Model` protocol; its cache rows are the keys and values of each
    layer."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        dtype = jnp.dtype(config.dtype)
        self.embed = nnx.Embed(
            config.vocab_size,
            config.width,
            dtype=dtype,
            embedding_init=nnx.initializers.normal(1.0),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        if config.learned_positions:
            self.positions = nnx.Param(
                0.02 * jax.random.normal(rngs.params(), (config.context, config.width))
            )
        self.norm = LayerNorm(config.width, config.norm_epsilon)
        self.head = dense_layer(config.width, config.vocab_size, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

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
        """The width of a hidden state."""
        return self.config.width

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache; rows are a tuple over layers of (keys, values), each [B, T, H,
        D]."""
        config = self.config
        shape = (batch, capacity, config.heads, config.width // config.heads)
        # One array a layer: stacked layers would be sliced, that is copied, at every call.
        empty = functools.partial(cache_lib.zeros, shape, config.dtype)
        rows = tuple((empty(), empty()) for _ in range(config.layers))
        return Cache(rows, jnp.zeros(batch, jnp.int32))

    def extend(
        self, tokens_BxN, positions_BxN, visible_BxNxM, cache=None, pending=0, *, layers=None
    ):
        """See `Model.extend`."""
        hidden, cache = self.hidden(
            tokens_BxN, positions_BxN, visible_BxNxM, cache, pending, layers=layers
        )
        return self.scored(hidden), cache

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
    ):
        """Returns what the head scores, [B, N, E] float32, after the last norm, instead of
        `extend`'s logits.

        `also` has numbers, from 1, of layers whose outputs follow it: [B, N, (1 + len(also)) * E].
        """
        outputs, rows = self._run(tokens_BxN, positions_BxN, visible_BxNxM, cache, pending, layers)
        shown = jnp.concatenate(
            [self.norm(outputs[-1]), *(outputs[layer - 1] for layer in also)], axis=-1
        )
        return shown, None if cache is None else Cache(rows, cache.lengths)

    def scored(self, hidden_BxNxE):
        """Returns logits [B, N, V] float32 of what `hidden` returns."""
        return self.head(hidden_BxNxE).astype(jnp.float32)

    def exits(
        self,
        tokens_BxN,
        positions_BxN,
        visible_BxNxN,
        after: tuple[int, ...],
        *,
        dropout_key=None,
        remat=False,
    ) -> list[jax.Array]:
        """Returns logits [B, N, V] after each of the layers in `after`, in one run on whole
        sequences: what training asks for.

        Consumes `dropout_key`; None for no dropout, which decoding never has. With `remat` the
        backward pass computes what is inside each block anew, instead of keeping it.
        """
        hidden, _ = self._run(
            tokens_BxN, positions_BxN, visible_BxNxN, None, 0, max(after), dropout_key, remat
        )
        return [self.scored(self.norm(hidden[layer - 1])) for layer in after]

    def _run(
        self,
        tokens_BxN,
        positions_BxN,
        visible_BxNxM,
        cache,
        pending,
        layers,
        dropout_key=None,
        remat=False,
    ):
        """Returns the output of each of the first `layers` blocks, [B, N, E], and the rows of the
        cache."""
        config = self.config
        count = config.layers if layers is None else layers
        if cache is None:
            layer_rows, starts_B, mask_BxNxT = (None,) * config.layers, None, visible_BxNxM
        else:
            layer_rows, starts_B = cache.rows, cache.lengths + pending
            mask_BxNxT = cache_lib.visible_slots(
                visible_BxNxM, cache.lengths, layer_rows[0][0].shape[1]
            )
        keys = (
            [None] * (config.layers + 1)
            if dropout_key is None
            else list(jax.random.split(dropout_key, config.layers + 1))
        )

        table_TxE = (
            self.positions[...]
            if config.learned_positions
            else sinusoidal_table(config.context, config.width)
        )
        # Nodes drafted past the context are never emitted: any position will do for them.
        positions_BxNxE = jnp.asarray(table_TxE).at[positions_BxN].get(mode="clip")
        x_BxNxE = self.embed(tokens_BxN).astype(jnp.float32) + positions_BxNxE.astype(jnp.float32)
        x_BxNxE = self.dropout(x_BxNxE, deterministic=keys[-1] is None, rngs=keys[-1])
        hidden, new_rows = [], []
        for block, rows, key in zip(
            self.blocks[:count], layer_rows[:count], keys[:count], strict=True
        ):
            run = nnx.remat(Block.__call__) if remat else Block.__call__
            x_BxNxE, rows = run(block, x_BxNxE, mask_BxNxT, rows, starts_B, key)
            hidden.append(x_BxNxE)
            new_rows.append(rows)
        return hidden, (*new_rows, *layer_rows[count:])


def abstract(config: TransformerConfig) -> tuple[Any, Any]:
    """Returns `nnx.split` of a decoder of this shape, without building it: (graphdef, state of
    abstract arrays)."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


def parameter_count(config: TransformerConfig) -> int:
    """Returns the number of parameters of a decoder of this shape."""
    _, state = abstract(config)
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))


def _split_init(parts):
    """Initialises `parts` square matrices side by side, each with its own fan-out."""
    init = nnx.initializers.xavier_uniform()

    def init_parts(key, shape, dtype, out_sharding=None):
        keys = jax.random.split(key, parts)
        return jnp.concatenate(
            [init(k, (shape[0], shape[1] // parts), dtype) for k in keys], axis=1
        )

    return init_parts
