"""Runs a model on new tokens, or on whole prompts.

Shape suffixes: B sequences, N nodes, T tokens of a sequence, E features of one layer, F features of
several layers.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spectr_jax.decoding.tree import PerRow, Tokens
from spectr_jax.models.base import features_shown
from spectr_jax.models.cache import Cache
from spectr_jax.transport.types import IntScalar
from spectr_jax.utils import backend, sharding

Prefilled: TypeAlias = tuple[Cache, Float[Array, "batch padded features"] | None]

PIECE, PIECE_ON_ACCELERATORS, PROMPT_TOKENS = 64, 1_024, 8_192
"""Numbers of tokens on which models run at once, which bound the memory of activations: of each
prompt on a CPU, of each prompt on an accelerator, and of all prompts there, but `PIECE` of each."""


def piece_length(sequences: int) -> int:
    """Returns the default number of tokens of each prompt on which models run at once."""
    if backend.on_cpu():
        return PIECE
    return min(max(PROMPT_TOKENS // sequences, PIECE), PIECE_ON_ACCELERATORS)


def run(
    model: Any,
    tokens_BxN: Int[Array, "batch new"],
    positions_BxN: Int[Array, "batch new"],
    visible_BxNxM: Bool[Array, "batch new visible"],
    cache: Cache,
    pending: int = 0,
    *,
    features_BxNxE: Float[Array, "batch new seen_features"] | None = None,
    layers_shown: tuple[int, ...] | None = None,
    only_B: PerRow | None = None,
) -> tuple[Float[Array, "batch scored vocab"], Float[Array, "batch scored features"] | None, Cache]:
    """Runs a model on new tokens; returns their logits and features, and the cache.

    Args:
      model: the target or the draft model.
      tokens_BxN, positions_BxN, visible_BxNxM, cache, pending: as in `Model.extend`.
      features_BxNxE: for a model that sees features: those of the token before each new token.
      layers_shown: static; the layers whose outputs follow the last hidden states in the features.
        With None, the features are None unless the model sees features.
      only_B: int32, the index of the one new token of each sequence that is scored; None for all.

    Returns:
      logits [B, N, V], features [B, N, E] or [B, N, F], and the cache; N is 1 with `only_B`.
    """
    if tokens_BxN.size == 1 and not backend.on_cpu():
        # For a single row, XLA's GPU kernels write every product of a weight to memory; for two
        # rows they do not. No row sees the second, and the next call overwrites it in the cache.
        inputs = tokens_BxN, positions_BxN, visible_BxNxM, features_BxNxE
        twice = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=1), inputs)
        tokens_BxN, positions_BxN, visible_BxNxM, features_BxNxE = twice
        visible_BxNxM = jnp.pad(visible_BxNxM, ((0, 0), (0, 0), (0, 1)))
        only_B = jnp.zeros(1, jnp.int32)
    arguments = tokens_BxN, positions_BxN, visible_BxNxM, cache, pending
    if features_BxNxE is not None:
        hidden, cache = model.hidden(*arguments, features_BxNxE=features_BxNxE)
    elif layers_shown is not None:
        hidden, cache = model.hidden(*arguments, **({"also": layers_shown} if layers_shown else {}))
    else:
        logits, cache = model.extend(*arguments)
        return sharding.split(_one(logits, only_B), axis=-1), None, cache
    hidden = _one(hidden, only_B)  # Select first: the head is expensive.
    last = hidden[..., : features_shown(model)] if layers_shown else hidden
    return sharding.split(model.logits_of(last), axis=-1), hidden, cache


def _one(
    x_BxNxC: Float[Array, "batch new channels"], only_B: PerRow | None
) -> Float[Array, "batch scored channels"]:
    """Returns the entries [B, 1, C] at `only_B`, or all if it is None."""
    if only_B is None:
        return x_BxNxC
    return jnp.take_along_axis(x_BxNxC, only_B[:, None, None], axis=1)


def run_on_prompts(
    model: Any,
    prompts_BxT: Tokens,
    lengths_B: PerRow,
    capacity: int,
    before_BxTxE: Float[Array, "batch prompt_time seen_features"] | None = None,
    layers_shown: tuple[int, ...] | None = None,
    piece: int | None = None,
) -> Prefilled:
    """Runs a model on the prompts, in pieces; returns the cache and the features [B, T, F] or None.

    Cache rows past the end of a shorter prompt are pending, and are overwritten later. `capacity`
    is the number of slots of the cache. `before_BxTxE` are the features of the token before each
    token, for a model that sees features; `layers_shown` is that of `run`. `piece` is the number of
    tokens of each prompt on which the model runs at once, rounded up to a multiple of 16; None for
    `piece_length`.
    """
    B, T = prompts_BxT.shape
    most = -(-(piece or piece_length(B)) // 16) * 16
    pieces = -(-T // most)
    width = T if pieces == 1 else -(-T // (16 * pieces)) * 16

    def pad(rows_BxT: Array) -> Array:
        missing = pieces * width - rows_BxT.shape[1]
        return jnp.pad(rows_BxT, ((0, 0), (0, missing), *[(0, 0)] * (rows_BxT.ndim - 2)))

    padded: Any = jax.tree.map(pad, (prompts_BxT, before_BxTxE))

    def step(number: IntScalar | int, carry: Prefilled) -> Prefilled:
        cache, shown = carry
        first = number * width
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=1)
        tokens, before = jax.tree.map(lambda rows: cut(rows, first), padded)
        # Padding may exceed the context; a NaN embedding there would get past the mask.
        positions = jnp.minimum(first + jnp.arange(width), model.context - 1)
        positions = jnp.broadcast_to(positions, (B, width))
        visible = jnp.broadcast_to(np.tri(width, dtype=bool), (B, width, width))
        cache = dataclasses.replace(cache, lengths=jnp.full(B, first, jnp.int32))
        new = tokens, positions, visible
        _, hidden, cache = run(model, *new, cache, features_BxNxE=before, layers_shown=layers_shown)
        if shown is not None and hidden is not None:
            hidden = hidden.astype(shown.dtype)
            shown = jax.lax.dynamic_update_slice_in_dim(shown, hidden, first, axis=1)
        return cache, shown

    F = 0 if layers_shown is None else (1 + len(layers_shown)) * features_shown(model)
    cache = model.init_cache(B, max(capacity, pieces * width))
    start = cache, jnp.zeros((B, pieces * width, F), jnp.float32) if F else None
    if pieces == 1:
        return step(0, start)
    pieces_used = (sharding.over_groups(jnp.max(lengths_B)) + width - 1) // width
    cache, shown = jax.lax.fori_loop(0, pieces_used, step, start)
    return cache, None if shown is None else shown[:, :T]
