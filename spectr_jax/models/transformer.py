"""The decoder-only transformer of the LM1B ladder, in Flax NNX.

Pre-LN, GELU, sinusoidal positions and an untied head, as in Flax's LM1B example. The 97M and 6M
shapes are those of Leviathan et al. (2023); the 2M and 20M halve and double the 6M (SpecTr,
appendix F).

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
from spectr_jax.models.base import Decoder, split_abstract
from spectr_jax.models.layers.attention import attention
from spectr_jax.models.layers.dense import dense_layer, parted
from spectr_jax.models.layers.norms import LayerNorm
from spectr_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The shape of a decoder.

    `dtype` is that of the factors of matrix products and of the cache; sums, norms and residuals
    are float32, as are parameters in training. `norm_epsilon`, `attention_bias` and
    `learned_positions` are for GPT-2 (`models.formats.gpt2`). `shards` is as in `LlamaConfig`.

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
    shards: int = 1

    def __post_init__(self):
        if self.heads < 1 or self.width % self.heads:
            raise UserError(f"width={self.width}: must be a multiple of heads={self.heads}")
        if self.width % 2 and not self.learned_positions:
            raise UserError(f"width={self.width}: must be even for sinusoidal positions")

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def of_layer(self, layer: int) -> "TransformerConfig":
        """Returns the config of a layer: all are alike."""
        return self


LADDER = {
    "draft_2m": TransformerConfig(layers=1, width=128, mlp=512, heads=2),
    "draft_6m": TransformerConfig(layers=2, width=256, mlp=1024, heads=4),
    "draft_20m": TransformerConfig(layers=4, width=512, mlp=2048, heads=8),
    "target_97m": TransformerConfig(layers=12, width=768, mlp=3072, heads=12),
}


def sinusoidal_table(length: int, width: int) -> np.ndarray:
    """Returns the positions [length, width] of Vaswani et al. (2017): sines, then cosines."""
    half = width // 2
    scale = np.exp(-math.log(10_000.0) * np.arange(half) / max(half - 1, 1))
    angles = np.arange(length)[:, None] * scale
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Block(nnx.Module):
    """Self-attention and MLP, each after a layer norm and with a residual connection."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        E, F, bias = config.width, config.mlp, config.attention_bias
        linear = functools.partial(dense_layer, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.config = config
        self.norm_attention = LayerNorm(E, config.norm_epsilon)
        self.qkv = linear(E, 3 * E, use_bias=bias, kernel_init=_split_init(3))
        self.out = linear(E, E, use_bias=bias)
        self.norm_mlp = LayerNorm(E, config.norm_epsilon)
        self.up = linear(E, F)
        self.down = linear(F, E)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BxNxE, mask_BxNxT, rows, starts_B, dropout_key):
        """Runs the block. `rows` are its cached (keys, values), each [B, T, H, D], or None."""
        keys = [None, None] if dropout_key is None else list(jax.random.split(dropout_key))
        attended_BxNxE, rows = self._attend(
            self.norm_attention(x_BxNxE), mask_BxNxT, rows, starts_B
        )
        x_BxNxE = x_BxNxE + _dropped(self.dropout, attended_BxNxE, keys[0])
        hidden_BxNxF = jax.nn.gelu(self.up(self.norm_mlp(x_BxNxE)))
        return x_BxNxE + _dropped(self.dropout, self.down(hidden_BxNxF), keys[1]), rows

    def _attend(self, x_BxNxE, mask_BxNxT, rows, starts_B):
        B, N, _ = x_BxNxE.shape
        q_BxNxHxD, *new = (
            part.reshape(B, N, self.config.heads, -1).astype(self.config.dtype)
            for part in parted(self.qkv(x_BxNxE), self.config.shards, [1, 1, 1])
        )
        (k_BxTxHxD, v_BxTxHxD), rows = cache_lib.append(rows, tuple(new), starts_B)
        mixed_BxNxHxD = attention(q_BxNxHxD, k_BxTxHxD, v_BxTxHxD, mask_BxNxT)
        return self.out(mixed_BxNxHxD.reshape(B, N, -1)), rows


class Transformer(Decoder):
    """A decoder of the ladder, or of GPT-2's family. It follows the `Model` protocol."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        V, E, dtype = config.vocab_size, config.width, jnp.dtype(config.dtype)
        initial = nnx.initializers.normal(1.0)
        self.config = config
        self.embed = nnx.Embed(V, E, dtype=dtype, embedding_init=initial, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        if config.learned_positions:
            table_TxE = 0.02 * jax.random.normal(rngs.params(), (config.context, E))
            self.positions = nnx.Param(table_TxE)
        self.norm = LayerNorm(E, config.norm_epsilon)
        self.head = dense_layer(E, V, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def logits_of(self, hidden_BxNxE):
        """Returns logits [B, N, V] float32 of what `hidden` returns."""
        return self.head(hidden_BxNxE).astype(jnp.float32)

    def exits(
        self, tokens_BxN, positions_BxN, visible_BxNxN, after, *, dropout_key=None, remat=False
    ) -> list[jax.Array]:
        """Returns logits [B, N, V] after each of the layers `after`, on whole sequences.

        Training calls this. `dropout_key` is consumed; None for no dropout. With `remat` the
        backward pass recomputes the activations inside each block instead of storing them.
        """
        outputs, _ = self._run(
            tokens_BxN, positions_BxN, visible_BxNxN, None, 0, max(after), dropout_key, remat
        )
        return [self.logits_of(self.norm(outputs[layer - 1])) for layer in after]

    def _run(
        self,
        tokens_BxN,
        positions_BxN,
        visible_BxNxM,
        cache,
        pending,
        layers,
        key=None,
        remat=False,
    ):
        """Returns the outputs [B, N, E] of the first `layers` blocks, and the cache."""
        config = self.config
        keys: Any = [None] * (config.layers + 1)
        if key is not None:
            keys = list(jax.random.split(key, config.layers + 1))
        table_TxE = (
            self.positions[...]
            if config.learned_positions
            else sinusoidal_table(config.context, config.width)
        )
        # Nodes drafted past the context are never emitted, so any position will do for them.
        positions_BxNxE = jnp.asarray(table_TxE).at[positions_BxN].get(mode="clip")
        x_BxNxE = self.embed(tokens_BxN).astype(jnp.float32) + positions_BxNxE.astype(jnp.float32)
        x_BxNxE = _dropped(self.dropout, x_BxNxE, keys[-1])
        call: Any = nnx.remat(Block.__call__) if remat else Block.__call__

        def run(index, *given):
            return call(self.blocks[index], *given, keys[index])

        return self._run_blocks(run, x_BxNxE, visible_BxNxM, cache, pending, layers)


def abstract(config: TransformerConfig) -> tuple[Any, Any]:
    """Returns (graphdef, state of abstract arrays) of a decoder of this shape."""
    return split_abstract(lambda rngs: Transformer(config, rngs=rngs))


def parameter_count(config: TransformerConfig) -> int:
    """Returns the number of parameters of a decoder of this shape."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract(config)[1]))


def _dropped(dropout: nnx.Dropout, x: jax.Array, key) -> jax.Array:
    return dropout(x, deterministic=key is None, rngs=key)


def _split_init(parts: int):
    """Returns an initializer of `parts` square matrices side by side, each with its own fan-out."""
    init = nnx.initializers.xavier_uniform()

    def init_parts(key, shape, dtype, out_sharding=None):
        keys = jax.random.split(key, parts)
        return jnp.concatenate(
            [init(k, (shape[0], shape[1] // parts), dtype) for k in keys], axis=1
        )

    return init_parts
