"""The decoder of Llama 2 and 3, SmolLM, TinyLlama, Mistral, and Qwen 2 and 3, in Flax NNX.

RMS norms before each part, rotary positions, grouped-query attention and SwiGLU (Touvron et al.,
2023, arXiv 2302.13971 and 2307.09288). The differences between members are fields of `LlamaConfig`.
`models.formats` reads weights from Hugging Face folders and GGUF files.

Shape suffixes: B sequences, N new tokens, M pending and new tokens, T slots, E width, F MLP width,
H query heads, K key and value heads, D head width, R half of it, V vocabulary.
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
from spectr_jax.models.layers.dense import Embed, dense_layer, parted
from spectr_jax.models.layers.norms import RMSNorm
from spectr_jax.models.vocabulary import NarrowEmbed, PartialHead
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a decoder of the family.

    `dtype` is that of the factors of matrix products and of the cache; sums, norms and residuals
    are float32.

    Attributes:
      kv_heads: number of key and value heads; each serves `heads / kv_heads` query heads.
      head_width: width of a head; `width / heads` in most models.
      tied: whether the head is the embedding.
      qkv_bias: whether queries, keys and values have biases (Qwen 2).
      qk_norm: whether queries and keys have RMS norms over each head (Qwen 3).
      rope_divisors: divisors of the rotary frequencies, one per pair of channels; empty for
        none (`llama3_divisors`).
      embed_rank: width of the embedding table of a draft with a large vocabulary
        (`models.vocabulary`); 0 for `width`.
      head_tokens: number of tokens that the head of such a draft scores; 0 for all.
      features: width of the target features that the draft consumes, the target's last hidden
        state at the token before (EAGLE: Li et al., 2024, arXiv 2401.15077); 0 if none. The
        draft's own state replaces it where the target has not run, so it equals `width`.
      feature_layers: target layers, from 1, whose outputs the draft sees besides the last
        hidden state (EAGLE-3: Li et al., 2025, arXiv 2503.01840). They are projected and added
        to it; empty for none.
      shards: number of devices for which the outputs of joined matrices are ordered
        (`models.parallel`); 1 for queries, keys and values, and for gate and up, one after another.

    Raises:
      UserError: a field has a value that does not fit the others.
    """

    layers: int
    width: int
    mlp: int
    heads: int
    kv_heads: int
    head_width: int
    vocab_size: int
    context: int
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] = ()
    norm_epsilon: float = 1e-5
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    embed_rank: int = 0
    head_tokens: int = 0
    features: int = 0
    feature_layers: tuple[int, ...] = ()
    shards: int = 1
    dtype: str = "float32"

    def __post_init__(self):
        for name in ("rope_divisors", "feature_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists.
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise UserError(f"heads={self.heads}: must be a multiple of kv_heads={self.kv_heads}")
        if self.head_width % 2 or self.head_width < 2:
            raise UserError(f"head_width={self.head_width}: must be even for rotary positions")
        if self.tied and (self.embed_rank or self.head_tokens):
            raise UserError("tied=True: must be False with embed_rank or head_tokens")
        if self.head_tokens > self.vocab_size:
            raise UserError(
                f"head_tokens={self.head_tokens}: must be at most vocab_size={self.vocab_size}"
            )
        if self.features not in (0, self.width):
            raise UserError(
                f"features={self.features}: must equal width={self.width}, and the target's width"
            )
        if self.feature_layers and (not self.features or min(self.feature_layers) < 1):
            raise UserError(
                f"feature_layers={self.feature_layers}: must be target layers, from 1, of a draft "
                "with features; set features, or leave feature_layers empty"
            )
        pairs, finite = self.head_width // 2, all(0 < d < math.inf for d in self.rope_divisors)
        if self.rope_divisors and (len(self.rope_divisors) != pairs or not finite):
            raise UserError(
                f"rope_divisors={self.rope_divisors}: must be {pairs} positive numbers, one "
                "for each pair of channels"
            )


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns radians per position [R] of the channel pairs of a head."""
    plain = config.rope_theta ** (-np.arange(0, config.head_width, 2) / config.head_width)
    return (plain / np.array(config.rope_divisors or 1.0)).astype(np.float32)


def llama3_divisors(
    theta: float, head_width: int, *, factor: float, low: float, high: float, context: int
) -> tuple[float, ...]:
    """Returns the divisors with which Llama 3.1 extends rotary positions.

    Frequencies with fewer than `low` turns in the original training `context` are divided by
    `factor`; those with more than `high` turns are kept.
    """
    plain = theta ** (-np.arange(0, head_width, 2) / head_width)
    kept = np.clip((context * plain / (2 * math.pi) - low) / (high - low), 0, 1)
    return tuple((1 / (kept + (1 - kept) / factor)).tolist())


class Block(nnx.Module):
    """Grouped-query attention and SwiGLU, each after an RMS norm and with a residual connection."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        linear = functools.partial(dense_layer, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.config = config
        self.norm_attention = RMSNorm(config.width, config.norm_epsilon)
        # One product for q, k and v, and one for gate and up: launch overhead dominates small calls.
        parts = (config.heads + 2 * config.kv_heads) * config.head_width
        self.qkv = linear(config.width, parts, use_bias=config.qkv_bias)
        self.out = linear(config.heads * config.head_width, config.width, use_bias=False)
        self.norm_q = RMSNorm(config.head_width, config.norm_epsilon) if config.qk_norm else None
        self.norm_k = RMSNorm(config.head_width, config.norm_epsilon) if config.qk_norm else None
        self.norm_mlp = RMSNorm(config.width, config.norm_epsilon)
        self.gate_up = linear(config.width, 2 * config.mlp, use_bias=False)
        self.down = linear(config.mlp, config.width, use_bias=False)

    def __call__(self, x_BxNxE, turns_BxNxR, mask_BxNxT, rows, starts_B):
        """Runs the block. `rows` are its cached (keys, values), each [B, T, K, D], or None."""
        attended_BxNxE, rows = self._attend(
            self.norm_attention(x_BxNxE), turns_BxNxR, mask_BxNxT, rows, starts_B
        )
        x_BxNxE = x_BxNxE + attended_BxNxE
        joined = self.gate_up(self.norm_mlp(x_BxNxE))
        gate_BxNxF, up_BxNxF = parted(joined, self.config.shards, [1, 1])
        return x_BxNxE + self.down(jax.nn.silu(gate_BxNxF) * up_BxNxF), rows

    def _attend(self, x_BxNxE, turns_BxNxR, mask_BxNxT, rows, starts_B):
        config = self.config
        B, N, _ = x_BxNxE.shape
        sizes = [config.heads, config.kv_heads, config.kv_heads]
        q_BxNxHxD, k_BxNxKxD, v_BxNxKxD = (
            part.reshape(B, N, -1, config.head_width)
            for part in parted(self.qkv(x_BxNxE), config.shards, sizes)
        )
        if self.norm_q is not None and self.norm_k is not None:
            q_BxNxHxD, k_BxNxKxD = self.norm_q(q_BxNxHxD), self.norm_k(k_BxNxKxD)
        q_BxNxHxD, k_BxNxKxD = rotated(q_BxNxHxD, turns_BxNxR), rotated(k_BxNxKxD, turns_BxNxR)
        q_BxNxHxD, *new = (part.astype(config.dtype) for part in (q_BxNxHxD, k_BxNxKxD, v_BxNxKxD))
        (k_BxTxKxD, v_BxTxKxD), rows = cache_lib.append(rows, tuple(new), starts_B)
        mixed_BxNxHxD = attention(q_BxNxHxD, k_BxTxKxD, v_BxTxKxD, mask_BxNxT)
        return self.out(mixed_BxNxHxD.reshape(B, N, -1)), rows


def turns(positions_BxN: jax.Array, frequencies_R: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines [B, N, R] of positions."""

    def of(positions):
        angles = positions[..., None].astype(jnp.float32) * frequencies_R
        return jnp.cos(angles), jnp.sin(angles)

    if not backend.on_cpu():
        return of(positions_BxN)
    # A loop, because XLA would fuse the cosines into every reader and recompute them for each head.
    axis = 1 if positions_BxN.shape[1] > 1 else 0
    found = jax.lax.map(of, jnp.moveaxis(positions_BxN, axis, 0))
    return jax.tree.map(lambda part: jnp.moveaxis(part, 0, axis), found)


def rotated(x_BxNxHxD: jax.Array, turns_BxNxR: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns heads rotated by their positions; channels i and D / 2 + i are a pair."""
    cosines, sines = (part[:, :, None] for part in turns_BxNxR)
    first, second = jnp.split(x_BxNxHxD, 2, axis=-1)
    return jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )


class Llama(Decoder):
    """A decoder of the Llama family, or a draft of its form. It follows the `Model` protocol."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        V, E, dtype = config.vocab_size, config.width, jnp.dtype(config.dtype)
        linear = functools.partial(dense_layer, use_bias=False, dtype=dtype, rngs=rngs)
        self.config = config
        if config.embed_rank:
            self.embed: Any = NarrowEmbed(V, config.embed_rank, E, dtype=dtype, rngs=rngs)
        else:
            initial = nnx.initializers.normal(0.02 if config.tied else 1.0)
            self.embed = Embed(V, E, dtype=dtype, embedding_init=initial, rngs=rngs)
        if config.features:
            self.norm_features = RMSNorm(config.features, config.norm_epsilon)
            self.join = linear(config.features, E)
        if count := len(config.feature_layers):
            self.norms_fuse = nnx.List([RMSNorm(E, config.norm_epsilon) for _ in range(count)])
            # Zeros: at first the draft sees only the last hidden state.
            zeros = nnx.initializers.zeros_init()
            self.fuse = linear(count * E, E, kernel_init=zeros)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(E, config.norm_epsilon)
        if config.head_tokens:
            self.head: Any = PartialHead(E, config.head_tokens, V, dtype=dtype, rngs=rngs)
        else:
            self.head = None if config.tied else linear(E, V)

    @property
    def features_seen(self) -> int:
        """Width of the target features that the draft consumes; 0 if none."""
        return self.config.features

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers that the draft sees besides the last hidden state."""
        return self.config.feature_layers

    def _run(
        self, tokens_BxN, positions_BxN, visible_BxNxM, cache, pending, layers, features_BxNxE=None
    ):
        """Returns the outputs [B, N, E] of the first `layers` blocks, and the cache.

        `features_BxNxE` is for a draft with `LlamaConfig.features`: zeros at the first token of a
        sequence. A target's `hidden` returns them with `also=feature_layers`; the draft's own
        states, of width E, have no other layers.

        Raises:
          UserError: the model needs features and none are given.
        """
        config = self.config
        if config.features and features_BxNxE is None:
            raise UserError("features_BxNxE=None: this draft needs the features of a target")
        x_BxNxE = self.embed(tokens_BxN).astype(jnp.float32)
        if config.features:
            joined_BxNxE = self.join(self.norm_features(self._fused(features_BxNxE)))
            x_BxNxE += joined_BxNxE.astype(jnp.float32)
        turns_BxNxR = turns(positions_BxN, rotary_frequencies(config))

        def run(index, x_BxNxE, *given):
            return _run_block(*nnx.split(self.blocks[index]), x_BxNxE, turns_BxNxR, *given)

        return self._run_blocks(run, x_BxNxE, visible_BxNxM, cache, pending, layers)

    def _fused(self, features_BxNxF):
        """Returns features as one hidden state [B, N, E]. Those of width E are returned unchanged."""
        parts = jnp.split(features_BxNxF, features_BxNxF.shape[-1] // self.config.width, axis=-1)
        if len(parts) == 1:
            return features_BxNxF
        lower = jnp.concatenate(
            [norm(part) for norm, part in zip(self.norms_fuse, parts[1:], strict=True)], axis=-1
        )
        return parts[0] + self.fuse(lower).astype(jnp.float32)

    def logits_of(self, x_BxNxE):
        """Returns logits [B, N, V] float32 of the result of `hidden`."""
        head = self.embed.attend if self.head is None else self.head
        return head(x_BxNxE).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _run_block(graphdef, state, *arguments):
    """Runs a block. One trace for all layers saves most of the time to the first token."""
    return nnx.merge(graphdef, state)(*arguments)


def abstract(config: LlamaConfig) -> tuple[Any, Any]:
    """Returns (graphdef, state of abstract arrays) of a decoder of this shape."""
    return split_abstract(lambda rngs: Llama(config, rngs=rngs))
