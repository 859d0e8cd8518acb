"""Phase 1 of a call: the draft model fills the tree, level by level (SpecTr, section 7).

Shape suffixes: B sequences, N drafted nodes, I nodes above the last level (the root among them), W nodes of a level, V
vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.tree import Tree
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache, keep
from spectr_jax.transport.base import draw

RECALLED = 2
"""Tokens that open each call. The draft never ran on the last accepted leaf, so it runs on the last two committed ones."""


class Drafts(NamedTuple):
    """What the draft model proposes.

    Attributes:
      tokens: [B, N + 1] int32 by node; the root's is the last committed token.
      p: [B, I, V] the law that the children of each node were drawn from.
      cache: the draft model's, with the inner nodes pending.
    """

    tokens: jax.Array
    p: jax.Array
    cache: Cache


def iid(key: jax.Array, p: jax.Array, count: int) -> jax.Array:
    """The i.i.d. rule: `count` independent draws [count] from p [V]; consumes `key`."""
    return draw(key, p, (count,))


def committed_length(lengths_B: jax.Array) -> jax.Array:
    """How many tokens of a text of each length the draft's cache holds between calls."""
    return jnp.maximum(lengths_B - RECALLED, 0)


def draft(
    keys_B: jax.Array,
    model: Model,
    rule,
    tree: Tree,
    policy: Policy,
    text_BxT: jax.Array,
    lengths_B: jax.Array,
    cache: Cache,
) -> Drafts:
    """Draws the tokens of the tree.

    Args:
      keys_B: one typed key a sequence, consumed.
      model: the draft model.
      rule: `rule(key, p, count)` draws the tokens of siblings.
      tree: static.
      policy: applied to the draft's logits.
      text_BxT: committed tokens, of `lengths_B` (at least 1) each.
      lengths_B: int32.
      cache: of length `committed_length(lengths_B)`.
    """
    B = lengths_B.shape[0]
    recalled_Bx2 = cache.lengths[:, None] + jnp.arange(RECALLED)
    # A text of one token has no second to last one: then the first recalled slot is the root, the second is nobody's.
    root_B = lengths_B - 1 - cache.lengths
    sees_recalled_Bx1x2 = (jnp.arange(RECALLED) <= root_B[:, None])[:, None, :]
    logits, cache = model.extend(
        jnp.take_along_axis(text_BxT, recalled_Bx2, axis=1),
        recalled_Bx2,
        jnp.broadcast_to(np.tri(RECALLED, dtype=bool), (B, RECALLED, RECALLED)),
        cache,
    )
    logits_BxWxV = jnp.take_along_axis(logits, root_B[:, None, None], axis=1)
    tokens = [jnp.take_along_axis(text_BxT, lengths_B[:, None] - 1, axis=1)]
    laws = []
    for depth, (above, nodes) in enumerate(zip(tree.levels[:-1], tree.levels[1:], strict=True), start=1):
        p_BxWxV = probabilities(logits_BxWxV, policy)
        laws.append(p_BxWxV)
        level_keys_B = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_B, depth)
        tokens.append(_children(level_keys_B, rule, tree, above, nodes, p_BxWxV))
        if depth < tree.height:
            pending = RECALLED + nodes[0] - 1
            among_nodes = tree.ancestors[nodes, 1 : nodes[-1] + 1]
            visible = jnp.concatenate(
                [
                    jnp.broadcast_to(sees_recalled_Bx1x2, (B, len(nodes), RECALLED)),
                    jnp.broadcast_to(among_nodes, (B, *among_nodes.shape)),
                ],
                axis=-1,
            )
            positions = jnp.broadcast_to(lengths_B[:, None] - 1 + depth, (B, len(nodes)))
            logits_BxWxV, cache = model.extend(tokens[-1], positions, visible, cache, int(pending))
    return Drafts(jnp.concatenate(tokens, axis=1), jnp.concatenate(laws, axis=1), cache)


def commit(cache: Cache, path_BxD: jax.Array, old_lengths_B: jax.Array, new_lengths_B: jax.Array) -> Cache:
    """Keeps the accepted path in the draft's cache.

    Args:
      cache: with a drafted tree pending.
      path_BxD: int32 accepted nodes, root excluded, in order; anything behind the accepted ones.
      old_lengths_B: of the text before the call.
      new_lengths_B: after it.
    """
    roots_B = old_lengths_B - 1 - cache.lengths
    index_D = jnp.arange(path_BxD.shape[1] + RECALLED)
    below_root = index_D[None, :] - roots_B[:, None] - 1
    nodes = jnp.take_along_axis(path_BxD, jnp.clip(below_root, 0, path_BxD.shape[1] - 1), axis=1)
    pending = jnp.where(below_root < 0, index_D[None, :], RECALLED + nodes - 1)
    return keep(cache, pending, committed_length(new_lengths_B))


def _children(keys_B, rule, tree: Tree, above: np.ndarray, nodes: np.ndarray, p_BxWxV: jax.Array) -> jax.Array:
    """Tokens [B, W'] of the `nodes` below the nodes `above`, whose laws are `p_BxWxV`."""
    ranks = tree.sibling_rank[nodes]
    most = int(ranks.max()) + 1
    parent_column = np.searchsorted(above, tree.parent[nodes])

    def one_text(key, p_WxV):
        drawn = jax.vmap(lambda k, p: rule(k, p, most))(jax.random.split(key, len(above)), p_WxV)
        return drawn[parent_column, ranks]

    return jax.vmap(one_text)(keys_B, p_BxWxV)
