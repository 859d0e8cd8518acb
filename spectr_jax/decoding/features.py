"""The target's last hidden states, for drafts that see them (EAGLE: Li et al., 2024, arXiv 2401.15077).

With each token of such a draft (`models.base.SeesFeatures`) come the features of the token before it. After each call of the
target, the draft runs on all tokens that the call added, with the target's features; deeper in the tree, where the target
has not run yet, with its own. Some drafts also see outputs of lower layers (EAGLE-3: Li et al., 2025, arXiv
2503.01840): then the target's features are F = (1 + layers) * E numbers a token, and the draft's own E.

Shape suffixes: B sequences, N nodes, T tokens of a sequence, R recalled tokens, E features, F
features of several layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spectr_jax.decoding.tree import Tree
from spectr_jax.models.base import feature_layers, features_seen, features_shown
from spectr_jax.models.cache import Cache
from spectr_jax.models.layers import cpu

RECALLED = 2
"""Tokens that open each call. The draft never ran on the last accepted leaf, so it runs on the last two committed ones."""


def recalled(draft: Any, tree: Tree) -> int:
    """Returns how many tokens the draft runs on first in each call: all that a call can add, if it sees their features."""
    return tree.height + 1 if features_seen(draft) else RECALLED


def wanted(draft: Any) -> tuple[int, ...] | None:
    """Returns the layers that a target must show besides its last hidden state; None for a draft that sees no features."""
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
    only_B: Int[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch scored vocab"], Float[Array, "batch scored features"] | None, Cache]:
    """Runs `Model.extend`; returns what it does, and the last hidden states [B, N, E] of a model that sees features, or that
    shall `show` its own.

    With layers in `show`, their outputs follow the last hidden states: [B, N, F]. With `only_B`, logits [B, 1, V] and
    features [B, 1, E] are those of one new token of each sequence.
    """
    if tokens_BxN.size == 1 and not cpu.on_cpu():
        # XLA's kernels for GPUs write every product of a weight and a single row to memory; for two rows they do not.
        # The second token is a copy that nothing sees, and the next call overwrites its cache row.
        tokens_BxN, positions_BxN = (
            jnp.repeat(tokens_BxN, 2, axis=1),
            jnp.repeat(positions_BxN, 2, axis=1),
        )
        features_BxNxE = None if features_BxNxE is None else jnp.repeat(features_BxNxE, 2, axis=1)
        visible_BxNxM = jnp.pad(jnp.repeat(visible_BxNxM, 2, axis=1), ((0, 0), (0, 0), (0, 1)))
        only_B = jnp.zeros(1, jnp.int32)
    arguments = tokens_BxN, positions_BxN, visible_BxNxM, cache, pending
    if features_BxNxE is not None:
        hidden, cache = model.hidden(*arguments, features_BxNxE=features_BxNxE)
    elif show is not None:
        hidden, cache = model.hidden(*arguments, **({"also": show} if show else {}))
    else:
        logits, cache = model.extend(*arguments)
        return _one(logits, only_B), None, cache
    hidden = _one(hidden, only_B)  # Before the head, which is large.
    last = hidden[..., : features_shown(model)] if show else hidden
    return model.scored(last), hidden, cache


def _one(
    x_BxNxC: Float[Array, "batch new channels"], only_B: Int[Array, " batch"] | None
) -> Float[Array, "batch scored channels"]:
    """Returns the entries of one new token of each sequence, or all of them for None."""
    return (
        x_BxNxC if only_B is None else jnp.take_along_axis(x_BxNxC, only_B[:, None, None], axis=1)
    )


def before(
    hidden_BxTxE: Float[Array, "batch time features"],
) -> Float[Array, "batch time features"]:
    """Returns the features of the token before each; zeros at the first."""
    return jnp.pad(hidden_BxTxE, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def at_end(
    hidden_BxTxE: Float[Array, "batch time features"], lengths_B: Int[Array, " batch"], count: int
) -> Float[Array, "batch recalled features"]:
    """Returns the features [B, R, E] that come with the last `count` tokens of prompts; zeros before their beginning."""
    index_BxR = lengths_B[:, None] - 1 - count + jnp.arange(count)
    found = jnp.take_along_axis(hidden_BxTxE, jnp.maximum(index_BxR, 0)[..., None], axis=1)
    return jnp.where(index_BxR[..., None] < 0, 0, found)


def after_call(
    features_BxRxE: Float[Array, "batch recalled features"],
    hidden_BxNxE: Float[Array, "batch nodes features"],
    path_BxD: Int[Array, "batch height"],
    emitted_B: Int[Array, " batch"],
) -> Float[Array, "batch recalled features"]:
    """Returns the features that come with the last R tokens once a call has added `emitted_B` of them.

    Args:
      features_BxRxE: those before the call.
      hidden_BxNxE: of the target at each node.
      path_BxD: int32 accepted nodes, root excluded, in order; later entries are ignored.
      emitted_B: int32.
    """
    nodes = jnp.pad(path_BxD, ((0, 0), (1, 0)))  # The root comes first.
    of_path = jnp.take_along_axis(hidden_BxNxE, jnp.maximum(nodes, 0)[..., None], axis=1)
    both = jnp.concatenate([features_BxRxE, of_path.astype(features_BxRxE.dtype)], axis=1)
    R = features_BxRxE.shape[1]
    return jax.vmap(lambda rows, first: jax.lax.dynamic_slice_in_dim(rows, first, R))(
        both, emitted_B
    )
