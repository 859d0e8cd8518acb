"""Phase 2 of a call (score): the target scores the whole tree at once (SpecTr, section 7)."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from spectr_jax.decoding import features
from spectr_jax.decoding.tree import NodeTokens, Paths, PerRow, Tree
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache, keep


def score(
    model: Model,
    tree: Tree,
    tokens_BxN: NodeTokens,
    lengths_B: PerRow,
    cache: Cache,
    show: tuple[int, ...] | None = None,
) -> tuple[Float[Array, "batch nodes vocab"], Float[Array, "batch nodes features"] | None, Cache]:
    """Runs the target once, on the last committed token (the root) and all drafted nodes.

    `cache` holds the committed tokens without the root. `show` is that of `features.extend`.

    Returns:
      logits [B, N + 1, V] of the token after each node, the features [B, N + 1, F] or None, and the
      cache with all nodes pending.
    """
    # Nodes past the context are never emitted, but a NaN there would get past the mask.
    positions = jnp.minimum(lengths_B[:, None] - 1 + jnp.asarray(tree.depth), model.context - 1)
    visible = jnp.broadcast_to(tree.ancestors, (lengths_B.shape[0], *tree.ancestors.shape))
    return features.extend(model, tokens_BxN, positions, visible, cache, show=show)


def commit(cache: Cache, tree: Tree, path_BxD: Paths, new_lengths_B: PerRow) -> Cache:
    """Keeps the root and the accepted path [B, D] (nodes, root excluded) in the target's cache.

    The root's row is already in place, and so are the rows of a chain.
    """
    moved = path_BxD[:, : 0 if tree.size == tree.height else None]
    return keep(cache, moved, new_lengths_B - 1, in_place=1)
