"""The decoder of Llama 2 and 3, Mistral, Qwen 2 and 3, Phi-3, and Gemma 1 to 4, in Flax NNX.

RMS norms before each part, rotary positions, grouped-query attention and SwiGLU (Touvron et al.,
2023, arXiv 2302.13971 and 2307.09288). The differences between members are fields of `LlamaConfig`;
those of Gemma are from its reports (arXiv 2408.00118 and 2503.19786). `models.formats` reads
weights from Hugging Face folders and GGUF files.

Shape suffixes: B sequences, N new tokens, M pending and new tokens, T slots, E width, F MLP width,
H query heads, K key and value heads, D head width, R half of it, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models import cache as cache_lib
from spectr_jax.models import rotary
from spectr_jax.models.base import Decoder, split_abstract
from spectr_jax.models.layers.attention import attention
from spectr_jax.models.layers.dense import Embed, dense_layer, parted
from spectr_jax.models.layers.norms import RMSNorm, rms_normalized
from spectr_jax.models.vocabulary import NarrowEmbed, PartialHead
from spectr_jax.utils.errors import UserError

ACTIVATIONS: dict[str, Any] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""The functions of an MLP's gate by their names in `LlamaConfig`."""


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
        none (`models.rotary`). Infinity: the pair is not rotated.
      rope_scale: factor of the rotary cosines and sines (YaRN).
      windows: for each layer, the number of last tokens that its attention sees, the new token
        included; 0 for all tokens. Empty: all layers see all tokens.
      window_rope_theta: base of the rotary positions of layers with a window, which then have
        neither divisors nor a scale; 0 if their positions are those of the other layers.
      full_kv_heads: number of key and value heads of the layers without a window, if theirs
        differs (Gemma 4); else 0.
      full_head_width: width of a head of the layers without a window, if theirs differs; else 0.
      keys_as_values: whether the layers without a window use their keys as values (Gemma 4).
      value_norm: whether values have RMS norms over each head, without parameters (Gemma 4).
      post_norms: whether RMS norms follow the attention and the MLP too (Gemma 2).
      layer_scale: whether the output of each layer is multiplied by a parameter (Gemma 4).
      activation: of the MLP's gate, "silu" or "gelu_tanh" (Gemma).
      embed_scale: factor of the embeddings.
      query_width: scores are divided by its square root; 0 for the width of a head.
      attention_cap: c in c * tanh(score / c); 0 for scores without bounds (Gemma 2).
      logit_cap: the same for logits.
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
    rope_scale: float = 1.0
    windows: tuple[int, ...] = ()
    window_rope_theta: float = 0.0
    full_kv_heads: int = 0
    full_head_width: int = 0
    keys_as_values: bool = False
    value_norm: bool = False
    post_norms: bool = False
    layer_scale: bool = False
    activation: str = "silu"
    embed_scale: float = 1.0
    query_width: float = 0.0
    attention_cap: float = 0.0
    logit_cap: float = 0.0
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
        for name in ("rope_divisors", "windows", "feature_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists.
        if self.tied and (self.embed_rank or self.head_tokens):
            raise UserError("tied=True: must be False with embed_rank or head_tokens")
        if self.head_tokens > self.vocab_size:
            raise UserError(
                f"head_tokens={self.head_tokens}: must be at most vocab_size={self.vocab_size}; "
                "lower model.head_tokens, or give 0 for all tokens"
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
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation={self.activation!r}: must be {' or '.join(ACTIVATIONS)}")
        if self.windows and (len(self.windows) != self.layers or min(self.windows) < 0):
            raise UserError(
                f"windows={self.windows!r:.60}: must be {self.layers} numbers of tokens, one for "
                "each layer; 0 for all tokens"
            )
        if not self.windows:
            _check_heads(self)
        for layer in range(len(self.windows)):
            self.of_layer(layer)

    def of_layer(self, layer: int) -> "LlamaConfig":
        """Returns the config of a decoder whose layers are all like one of this decoder, from 0."""
        if not self.windows:
            return self
        changes: dict[str, Any] = {"windows": (), "full_kv_heads": 0, "full_head_width": 0}
        if self.windows[layer]:
            changes["keys_as_values"] = False
            if self.window_rope_theta:
                changes |= {"rope_divisors": (), "rope_scale": 1.0}
                changes["rope_theta"] = self.window_rope_theta
        else:
            changes["kv_heads"] = self.full_kv_heads or self.kv_heads
            changes["head_width"] = self.full_head_width or self.head_width
        return dataclasses.replace(self, **changes)


def _check_heads(config: LlamaConfig) -> None:
    """Raises `UserError` if the heads or the rotary positions of a decoder do not fit."""
    if config.kv_heads < 1 or config.heads % config.kv_heads:
        raise UserError(f"heads={config.heads}: must be a multiple of kv_heads={config.kv_heads}")
    if config.head_width % 2 or config.head_width < 2:
        raise UserError(f"head_width={config.head_width}: must be even for rotary positions")
    pairs, positive = config.head_width // 2, all(d > 0 for d in config.rope_divisors)
    if config.rope_divisors and (len(config.rope_divisors) != pairs or not positive):
        raise UserError(
            f"rope_divisors={config.rope_divisors!r:.60}: must be {pairs} positive numbers, one for each "
            "pair of channels"
        )


def rotary_frequencies(config: LlamaConfig) -> np.ndarray:
    """Returns radians per position [R] of the channel pairs of a head."""
    plain = rotary.frequencies(config.rope_theta, config.head_width)
    return (plain / np.array(config.rope_divisors or 1.0)).astype(np.float32)


class Block(nnx.Module):
    """Grouped-query attention and a gated MLP, each after an RMS norm and with a residual connection."""

    def __init__(self, config: LlamaConfig, *, inputs: int = 0, rngs: nnx.Rngs):
        """Makes a block of `LlamaConfig.of_layer`. `inputs` is the width of the attention's inputs;
        0 for that of the model."""
        linear = functools.partial(dense_layer, dtype=jnp.dtype(config.dtype), rngs=rngs)
        norm = functools.partial(RMSNorm, epsilon=config.norm_epsilon)
        self.config, E = config, config.width
        self.norm_attention = norm(E)
        # One product for q, k and v, and one for gate and up: launch overhead dominates small calls.
        parts = sum(_joined_heads(config)) * config.head_width
        self.qkv = linear(inputs or E, parts, use_bias=config.qkv_bias)
        self.out = linear(config.heads * config.head_width, E, use_bias=False)
        self.norm_q = norm(config.head_width) if config.qk_norm else None
        self.norm_k = norm(config.head_width) if config.qk_norm else None
        self.norm_attended = norm(E) if config.post_norms else None
        self.norm_mlp = norm(E)
        self.gate_up = linear(E, 2 * config.mlp, use_bias=False)
        self.down = linear(config.mlp, E, use_bias=False)
        self.norm_down = norm(E) if config.post_norms else None
        self.layer_scale = nnx.Param(jnp.ones(1)) if config.layer_scale else None

    def __call__(self, x_BxNxE, turns_BxNxR, mask_BxNxT, rows, starts_B):
        """Runs the block. `rows` are its cached (keys, values), each [B, T, K, D], or None."""
        attended_BxNxE, rows = self._attend(
            self.norm_attention(x_BxNxE), turns_BxNxR, mask_BxNxT, rows, starts_B
        )
        if self.norm_attended is not None:
            attended_BxNxE = self.norm_attended(attended_BxNxE)
        return self._mlp(x_BxNxE + attended_BxNxE), rows

    def _mlp(self, x_BxNxE):
        joined = self.gate_up(self.norm_mlp(x_BxNxE))
        gate_BxNxF, up_BxNxF = parted(joined, self.config.shards, [1, 1])
        down_BxNxE = self.down(ACTIVATIONS[self.config.activation](gate_BxNxF) * up_BxNxF)
        if self.norm_down is not None:
            down_BxNxE = self.norm_down(down_BxNxE)
        x_BxNxE = x_BxNxE + down_BxNxE
        return x_BxNxE if self.layer_scale is None else x_BxNxE * self.layer_scale[...]

    def _attend(self, x_BxNxE, turns_BxNxR, mask_BxNxT, rows, starts_B):
        config = self.config
        B, N, _ = x_BxNxE.shape
        q_BxNxHxD, k_BxNxKxD, *values = (
            part.reshape(B, N, -1, config.head_width)
            for part in parted(self.qkv(x_BxNxE), config.shards, _joined_heads(config))
        )
        v_BxNxKxD = values[0] if values else k_BxNxKxD
        if self.norm_q is not None and self.norm_k is not None:
            q_BxNxHxD, k_BxNxKxD = self.norm_q(q_BxNxHxD), self.norm_k(k_BxNxKxD)
        if config.value_norm:
            v_BxNxKxD = rms_normalized(v_BxNxKxD, config.norm_epsilon)
        q_BxNxHxD, k_BxNxKxD = (
            rotary.rotated(part, turns_BxNxR) for part in (q_BxNxHxD, k_BxNxKxD)
        )
        if config.query_width:  # `attention` divides by the square root of the head's width.
            q_BxNxHxD *= np.sqrt(config.head_width / config.query_width, dtype=np.float32)
        q_BxNxHxD, *new = (part.astype(config.dtype) for part in (q_BxNxHxD, k_BxNxKxD, v_BxNxKxD))
        (k_BxTxKxD, v_BxTxKxD), rows = cache_lib.append(rows, tuple(new), starts_B)
        mixed_BxNxHxD = attention(
            q_BxNxHxD, k_BxTxKxD, v_BxTxKxD, mask_BxNxT, cap=config.attention_cap
        )
        return self.out(mixed_BxNxHxD.reshape(B, N, -1)), rows


def _joined_heads(config: LlamaConfig) -> list[int]:
    """Returns the numbers of heads of the queries, the keys and, unless these are keys, the values."""
    return [config.heads, config.kv_heads, *([] if config.keys_as_values else [config.kv_heads])]


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
        kinds = map(config.of_layer, range(config.layers))
        self.blocks = nnx.List([Block(kind, rngs=rngs) for kind in kinds])
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
        x_BxNxE = self.embed(tokens_BxN).astype(jnp.float32) * config.embed_scale
        if config.features:
            joined_BxNxE = self.join(self.norm_features(self._fused(features_BxNxE)))
            x_BxNxE += joined_BxNxE.astype(jnp.float32)
        turns = {
            kind: rotary.turns(positions_BxN, rotary_frequencies(kind), kind.rope_scale)
            for kind in dict.fromkeys(block.config for block in self.blocks)
        }

        def run(index, x_BxNxE, *given):
            block = self.blocks[index]
            return _run_block(*nnx.split(block), x_BxNxE, turns[block.config], *given)

        return self._run_blocks(run, x_BxNxE, visible_BxNxM, cache, pending, layers, config.windows)

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
        logits, cap = head(x_BxNxE).astype(jnp.float32), self.config.logit_cap
        return cap * jnp.tanh(logits / cap) if cap else logits


@functools.partial(jax.jit, static_argnums=0)
def _run_block(graphdef, state, *arguments):
    """Runs a block. One trace for all layers saves most of the time to the first token."""
    return nnx.merge(graphdef, state)(*arguments)


def abstract(config: LlamaConfig) -> tuple[Any, Any]:
    """Returns (graphdef, state of abstract arrays) of a decoder of this shape."""
    return split_abstract(lambda rngs: Llama(config, rngs=rngs))
