"""The target's features (last hidden states), for drafts that see them.

Such a draft (`models.base.SeesFeatures`) reads each token with the features of the token before it.
After each call of the target, the draft runs on all tokens that the call added, with the target's
features. Deeper in the tree, where the target has not run yet, it uses its own features. Some
drafts also see outputs of lower layers: then the target's features have width F = (1 + layers) * E,
and the draft's own have width E.

Sources: EAGLE (Li et al., 2024, arXiv 2401.15077); EAGLE-3 (Li et al., 2025, arXiv 2503.01840).

Shape suffixes: B sequences, N nodes, T tokens of a sequence, R recalled tokens, E features of one
layer, F features of several layers.
"""

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spectr_jax.decoding.tree import Paths, PerRow, Tree
from spectr_jax.models.base import feature_layers, features_seen, features_shown
from spectr_jax.models.cache import Cache
from spectr_jax.models.layers import cpu

Hidden: TypeAlias = Float[Array, "batch time features"]
Recalled: TypeAlias = Float[Array, "batch recalled features"]

RECALLED = 2
"""The number of committed tokens that the draft runs on first in each call.

The draft has not run on the last token, nor on the token before it if that was an accepted leaf.
"""


def recalled(draft: Any, tree: Tree) -> int:
    """Returns R, the number of committed tokens that the draft runs on first in each call.

    A draft that sees features runs on as many tokens as a call can add.
    """
    return tree.height + 1 if features_seen(draft) else RECALLED


def wanted(draft: Any) -> tuple[int, ...] | None:
    """Returns the layers whose outputs the draft sees besides the last hidden states.

    The result is None for a draft that sees no features.
    """
    return feature_layers(draft) if features_seen(draft) else None


def extend(
    model: Any,
    tokens_BxN: Int[Array, "batch new"],
    positions_BxN: Int[Array, "batch new"],
    visible_BxNxM: Bool[Array, "batch new visible"],
    cache: Cache,
    pending: int = 0,
    *,
    features_BxNxE: Float[Array, "batch new given_features"] | None = None,
    show: tuple[int, ...] | None = None,
    only_B: PerRow | None = None,
) -> tuple[Float[Array, "batch scored vocab"], Float[Array, "batch scored features"] | None, Cache]:
    """Runs a model on new tokens; returns their logits and features, and the cache.

    Args:
      model: the target or the draft model.
      tokens_BxN, positions_BxN, visible_BxNxM, cache, pending: as in `Model.extend`.
      features_BxNxE: for a model that sees features: those of the token before each new token.
      show: static; the layers whose outputs follow the last hidden states in the features. With
        None, the features are None unless the model sees features.
      only_B: int32, the index of the one new token of each sequence that is scored; None for all.

    Returns:
      logits [B, N, V], features [B, N, E] or [B, N, F], and the cache; N is 1 with `only_B`.
    """
    if tokens_BxN.size == 1 and not cpu.on_cpu():
        # For a single row, XLA's GPU kernels write every product of a weight to memory; for two
        # rows they do not. No row sees the second, and the next call overwrites it in the cache.
        given = tokens_BxN, positions_BxN, visible_BxNxM, features_BxNxE
        twice = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=1), given)
        tokens_BxN, positions_BxN, visible_BxNxM, features_BxNxE = twice
        visible_BxNxM = jnp.pad(visible_BxNxM, ((0, 0), (0, 0), (0, 1)))
        only_B = jnp.zeros(1, jnp.int32)
    arguments = tokens_BxN, positions_BxN, visible_BxNxM, cache, pending
    if features_BxNxE is not None:
        hidden, cache = model.hidden(*arguments, features_BxNxE=features_BxNxE)
    elif show is not None:
        hidden, cache = model.hidden(*arguments, **({"also": show} if show else {}))
    else:
        logits, cache = model.extend(*arguments)
        return _one(logits, only_B), None, cache
    hidden = _one(hidden, only_B)  # Select first: the head is expensive.
    last = hidden[..., : features_shown(model)] if show else hidden
    return model.logits_of(last), hidden, cache


def _one(
    x_BxNxC: Float[Array, "batch new channels"], only_B: PerRow | None
) -> Float[Array, "batch scored channels"]:
    """Returns the entries [B, 1, C] at `only_B`, or all if it is None."""
    if only_B is None:
        return x_BxNxC
    return jnp.take_along_axis(x_BxNxC, only_B[:, None, None], axis=1)


def at_end(hidden_BxTxE: Hidden, lengths_B: PerRow, count: int) -> Recalled:
    """Returns the features [B, R, E] for the last R = `count` tokens of prompts; 0 where missing.

    The features for a token are those of the token before it.
    """
    index_BxR = lengths_B[:, None] - 1 - count + jnp.arange(count)
    found = jnp.take_along_axis(hidden_BxTxE, jnp.maximum(index_BxR, 0)[..., None], axis=1)
    return jnp.where(index_BxR[..., None] < 0, 0, found)


def after_call(
    features_BxRxE: Recalled,
    hidden_BxNxE: Float[Array, "batch nodes features"],
    path_BxD: Paths,
    emitted_B: PerRow,
) -> Recalled:
    """Returns the features for the last R tokens after a call, given those before it.

    `hidden_BxNxE` are the target's features of each node; the call added `emitted_B` tokens.
    """
    nodes = jnp.pad(path_BxD, ((0, 0), (1, 0)))  # The root comes first.
    of_path = jnp.take_along_axis(hidden_BxNxE, jnp.maximum(nodes, 0)[..., None], axis=1)
    both = jnp.concatenate([features_BxRxE, of_path.astype(features_BxRxE.dtype)], axis=1)
    last = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=features_BxRxE.shape[1])
    return jax.vmap(last)(both, emitted_B)
