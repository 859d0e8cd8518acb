"""EAGLE-3 heads as others publish them (Li et al., 2025, arXiv 2503.01840), in Flax NNX.

A head is a decoder of one layer, or a few. The attention of its first layer reads, side by side,
the embedding of a token and the features of the token before it. These are outputs of layers of the
target where it has run, projected to the head's width, and elsewhere the output of the head itself.
`models.formats.eagle3` reads heads.

Shape suffixes: B sequences, N new tokens, M pending and new tokens, T slots, E width, F features of
the target: its last hidden state, then the outputs of the layers that the head sees.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.models import rotary
from spectr_jax.models.base import Decoder
from spectr_jax.models.layers.dense import Embed, dense_layer
from spectr_jax.models.layers.norms import RMSNorm
from spectr_jax.models.llama import Block, LlamaConfig, rotary_frequencies
from spectr_jax.models.vocabulary import PartialHead
from spectr_jax.utils.errors import UserError

FUSED = 3
"""The number of target layers that a head sees unless it names them."""
LEAST_LAYERS = 7
"""The smallest number of layers of a target whose `default_layers` are different layers."""


@dataclasses.dataclass(frozen=True)
class Eagle3Config(LlamaConfig):
    """The shape of a head.

    Attributes:
      target_width: width of the target's hidden states.
      target_layers: target layers, from 1, whose outputs the head sees; empty for
        `default_layers` of the target, from which `Eagle3.completed` takes them.
      own_embed: whether the head has an embedding; if not, it takes the target's.
      norm_before_residual: whether the first residual connection adds the features after their
        norm, as most heads of `speculators` do.
      norm_each: whether the output of each target layer has an RMS norm before the projection
        (EAGLE-3.1).
      norm_joined: whether these outputs have one RMS norm together.
      norm_output: whether the features of a drafted token are the head's output after its final
        norm (EAGLE-3.1).
    """

    target_width: int = 0
    target_layers: tuple[int, ...] = ()
    own_embed: bool = True
    norm_before_residual: bool = False
    norm_each: bool = False
    norm_joined: bool = False
    norm_output: bool = False

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "target_layers", tuple(self.target_layers))
        if self.width == (1 + self.fused) * self.target_width:
            raise UserError(
                f"width={self.width}: must differ from the {1 + self.fused} states of width "
                f"{self.target_width} of the target, from which the head tells its own"
            )

    @property
    def fused(self) -> int:
        """Number of target layers that the head sees."""
        return len(self.target_layers) or FUSED


def default_layers(layers: int) -> tuple[int, ...]:
    """Returns the layers, from 1, that heads see of a target with this number of layers.

    EAGLE's authors keep the states before the layers 2, L // 2 and L - 3, counted from 0, which are
    the outputs of the layers of these numbers, counted from 1.
    """
    return 2, layers // 2, layers - 3


class FirstBlock(Block):
    """A block whose attention reads an embedding and features; its residual is the features."""

    def __init__(self, config: Eagle3Config, *, rngs: nnx.Rngs):
        super().__init__(config, inputs=2 * config.width, rngs=rngs)
        self.norm_features = RMSNorm(config.width, config.norm_epsilon)

    def __call__(self, x_BxNx2E, turns_BxNxR, mask_BxNxT, rows, starts_B):
        """Runs the block; `x_BxNx2E` are embeddings and features."""
        config: Any = self.config
        embedded_BxNxE, features_BxNxE = jnp.split(x_BxNx2E, 2, axis=-1)
        normed_BxNxE = self.norm_features(features_BxNxE)
        both = jnp.concatenate([self.norm_attention(embedded_BxNxE), normed_BxNxE], axis=-1)
        attended_BxNxE, rows = self._attend(both, turns_BxNxR, mask_BxNxT, rows, starts_B)
        residual_BxNxE = normed_BxNxE if config.norm_before_residual else features_BxNxE
        return self._mlp(residual_BxNxE + attended_BxNxE), rows


class Eagle3(Decoder):
    """An EAGLE-3 head. It follows the protocol `SeesFeatures`.

    Other programs never run a head on the first token of a sequence, which no features precede. Here
    it runs on it, with zeros, and no later token sees the result. Positions, which some of them count
    from the second token, enter attention as differences only.
    """

    def __init__(self, config: Eagle3Config, *, rngs: nnx.Rngs):
        V, E, dtype = config.vocab_size, config.width, jnp.dtype(config.dtype)
        linear = functools.partial(dense_layer, use_bias=False, dtype=dtype, rngs=rngs)
        self.config: Eagle3Config = config
        self.embed: Any = Embed(V, E, dtype=dtype, rngs=rngs) if config.own_embed else None
        widths = [config.target_width] * config.fused
        normed = widths if config.norm_each else [sum(widths)] if config.norm_joined else []
        self.norms_fuse = nnx.List([RMSNorm(width, config.norm_epsilon) for width in normed])
        self.fuse = linear(sum(widths), E)
        rest = [Block(config, rngs=rngs) for _ in range(config.layers - 1)]
        self.blocks = nnx.List([FirstBlock(config, rngs=rngs), *rest])
        self.norm = RMSNorm(E, config.norm_epsilon)
        if config.head_tokens:
            self.head: Any = PartialHead(E, config.head_tokens, V, dtype=dtype, rngs=rngs)
        else:
            self.head = linear(E, V)

    @property
    def features_seen(self) -> int:
        """Width of the target's hidden states."""
        return self.config.target_width

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers that the head sees; raises `UserError` before the head is `completed`."""
        if not self.config.target_layers or self.embed is None:
            part = "its embedding" if self.embed is None else "the layers that it sees"
            raise UserError(
                f"draft: an EAGLE-3 head that takes {part} from its target; load both with "
                "spectr_jax.loading.load_pair"
            )
        return self.config.target_layers

    def completed(self, target: Any) -> "Eagle3":
        """Returns the head with the parts that it takes from its target, whose arrays it shares.

        These are the layers that it sees and the embedding, unless it has them, and the context:
        rotary positions have no last one, and EAGLE's authors run heads past the length on which
        they were trained.

        Raises:
          UserError: the target has too few layers, or no embedding of the head's width.
        """
        config, count = self.config, target.layers
        layers = config.target_layers or default_layers(count)
        if not config.target_layers and count < LEAST_LAYERS:
            raise UserError(
                f"draft: sees the layers 2, L / 2 and L - 3 of its target, which needs at least "
                f"{LEAST_LAYERS} layers and has {count}; give the target that it was trained for"
            )
        if max(layers) > count or len({*layers}) < len(layers) or min(layers) < 1:
            raise UserError(
                f"draft: sees layers {layers}, but this target has {count}; give the target that "
                "it was trained for"
            )
        whole = dataclasses.replace(config, target_layers=layers, context=target.context)
        if whole == config and self.embed is not None:
            return self
        copy: Any = nnx.clone(self)
        copy.config = whole
        if self.embed is None:
            embed, width = getattr(target, "embed", None), getattr(target, "features_shown", 0)
            if embed is None or width != config.width:
                raise UserError(
                    f"draft: is of width {config.width} without an embedding, and this target has "
                    "none of that width; give the target that it was trained for"
                )
            copy.embed = nnx.data(embed)
        return copy

    def _shown(self, x_BxNxE):
        """Returns the features that drafts after the new tokens read."""
        return self.norm(x_BxNxE) if self.config.norm_output else x_BxNxE

    def _run(
        self, tokens_BxN, positions_BxN, visible_BxNxM, cache, pending, layers, features_BxNxE=None
    ):
        if features_BxNxE is None:
            raise UserError("features_BxNxE=None: this draft needs the features of a target")
        embedded_BxNxE = self.embed(tokens_BxN).astype(jnp.float32)
        x_BxNx2E = jnp.concatenate([embedded_BxNxE, self._fused(features_BxNxE)], axis=-1)
        frequencies_R = rotary_frequencies(self.config)
        turns_BxNxR = rotary.turns(positions_BxN, frequencies_R, self.config.rope_scale)

        def run(index, x, mask_BxNxT, *given):
            seen = _without_first(mask_BxNxT, positions_BxN, cache is not None)
            return self.blocks[index](x, turns_BxNxR, seen, *given)

        return self._run_blocks(run, x_BxNx2E, visible_BxNxM, cache, pending, layers)

    def _fused(self, features_BxNxF):
        """Returns features as one state [B, N, E]. The head's own are returned unchanged."""
        config = self.config
        features_BxNxF = features_BxNxF.astype(jnp.float32)
        if features_BxNxF.shape[-1] == config.width:
            return features_BxNxF
        seen = features_BxNxF[..., config.target_width :]  # Without the last hidden state.
        if self.norms_fuse:
            parts = jnp.split(seen, len(self.norms_fuse), axis=-1)
            normed = [norm(part) for norm, part in zip(self.norms_fuse, parts, strict=True)]
            seen = jnp.concatenate(normed, axis=-1)
        return self.fuse(seen).astype(jnp.float32)

    def logits_of(self, x_BxNxE):
        """Returns logits [B, N, V] float32 of the result of `hidden`."""
        normed = x_BxNxE if self.config.norm_output else self.norm(x_BxNxE)
        return self.head(normed).astype(jnp.float32)


def _without_first(mask_BxNxT: jax.Array, positions_BxN: jax.Array, cached: bool) -> jax.Array:
    """Returns a mask [B, N, T] in which no later token sees the first of its sequence.

    The first token is in the first slot of a cache; without one, the slots are the tokens.
    """
    is_first = jnp.arange(mask_BxNxT.shape[-1])[None] == 0 if cached else positions_BxN == 0
    return mask_BxNxT & (~is_first[:, None, :] | (positions_BxN == 0)[:, :, None])
