"""Phase 1 of a call: the draft model fills the tree, level by level (SpecTr, section 7).

The draft model runs on the nodes that have children, the inner ones, and a rule draws the children of each.

Shape suffixes: B sequences, N drafted nodes, I inner nodes (the root among them), W inner nodes of a level, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding import features
from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.tree import Tree
from spectr_jax.models.base import Model, features_seen
from spectr_jax.models.cache import Cache, keep
from spectr_jax.models.frozen import Frozen
from spectr_jax.transport import race as race_plan
from spectr_jax.transport.base import draw


class Drafts(NamedTuple):
    """What the draft model proposes.

    Attributes:
      tokens: [B, N + 1] int32 by node; the root's is the last committed token.
      p: [B, I, V] draft distribution at each inner node.
      cache: the draft model's KV cache, with the inner nodes pending.
    """

    tokens: jax.Array
    p: jax.Array
    cache: Cache


def iid(key: jax.Array, p: jax.Array, counts: np.ndarray) -> jax.Array:
    """Independent draws [W, C] from each distribution in p [W, V]; consumes `key`."""
    return _each(key, p, lambda k, law: draw(k, law, (counts.max(),)))


def without_replacement(key: jax.Array, p: jax.Array, counts: np.ndarray) -> jax.Array:
    """C distinct tokens per node, [W, C], drawn from p [W, V] without replacement by one race per node (Gumbel top-k);
    consumes `key`.

    They follow the Plackett-Luce distribution: each is drawn from p without those before it. Once the support of p is
    exhausted, distinct tokens with p = 0 follow.
    """
    return _each(key, p, lambda k, law: race_plan.arrivals(k, law, counts.max()))


def race(key: jax.Array, p: jax.Array, counts: np.ndarray) -> jax.Array:
    """As `without_replacement`, with the same race for all nodes of the level, which `transport.race` uses too."""
    return jax.vmap(lambda law: race_plan.arrivals(key, law, counts.max()))(p)


def greedy(key: jax.Array, p: jax.Array, counts: np.ndarray) -> jax.Array:
    """All but the last child of a node are the likeliest tokens of p [W, V], the last is a draw from the others (Hu et al.,
    2025); consumes `key`."""

    def likeliest_and_one(key, law, count):
        likeliest = jax.lax.top_k(law, counts.max() - 1)[1]
        is_likeliest = jnp.arange(counts.max()) < count - 1
        one = draw(key, law.at[jnp.where(is_likeliest[:-1], likeliest, len(law))].set(0, mode="drop"))
        return jnp.where(is_likeliest, jnp.append(likeliest, 0), one).astype(jnp.int32)

    return _each(key, p, likeliest_and_one, jnp.asarray(counts))


RULES: dict[str, Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]] = {
    "iid": iid,
    "without_replacement": without_replacement,
    "race": race,
    "greedy": greedy,
}
"""How the children of the W inner nodes of a level are drawn, by the name in `Plan.drafts`.

Each is a function of a key, the distributions p [W, V] and `counts` [W], the number of children of each node. It
returns [W, C]
tokens, C the largest count; entries at and beyond a node's count are unused.
"""


def committed_length(lengths_B: jax.Array, recalled: int = features.RECALLED) -> jax.Array:
    """The number of tokens that the draft's cache holds between calls, for sequences of these lengths."""
    return jnp.maximum(lengths_B - recalled, 0)


def draft(
    keys_B: jax.Array,
    model: Model,
    rule,
    tree: Tree,
    policy: Policy,
    text_BxT: jax.Array,
    lengths_B: jax.Array,
    cache: Cache,
    seen_BxRxE: jax.Array | None = None,
) -> Drafts:
    """Draws the tokens of the tree.

    Args:
      keys_B: one typed key per sequence, consumed; depth d after n committed tokens uses `fold_in(key, n + d - 1)`.
      model: the draft model.
      rule: one of `RULES`.
      tree: static.
      policy: applied to the draft's logits.
      text_BxT: committed tokens, of `lengths_B` (at least 1) each.
      lengths_B: int32.
      cache: of length `committed_length(lengths_B, R)`, R as `features.recalled` says.
      seen_BxRxE: the target's features that come with the last R tokens, for a draft that sees them.
    """
    B, R = lengths_B.shape[0], features.recalled(model, tree)
    # A text shorter than R: then the root is an earlier one of the recalled slots, and those behind it are nobody's.
    root_B = lengths_B - 1 - cache.lengths
    sees_recalled_Bx1xR = (jnp.arange(R) <= root_B[:, None])[:, None, :]
    logits_BxWxV, own_BxWxE, cache = _recall(model, R, text_BxT, root_B, cache, seen_BxRxE)
    tokens = [jnp.take_along_axis(text_BxT, lengths_B[:, None] - 1, axis=1)]
    laws, parent_ranks = [], np.zeros(1, int)
    for depth, nodes in enumerate(tree.levels[1:]):
        laws.append(probabilities(logits_BxWxV, policy))
        level_keys_B = jax.vmap(jax.random.fold_in)(keys_B, lengths_B + depth)
        tokens.append(_children(level_keys_B, rule, tree, nodes, laws[-1]))
        inner = np.intersect1d(nodes, tree.inner)
        if len(inner):
            first, ranks = nodes[0], tree.inner_rank[inner]
            pending = R + ranks[0] - 1
            among_inner = tree.ancestors[np.ix_(inner, tree.inner[1 : ranks[-1] + 1])]
            visible = jnp.concatenate(
                [
                    jnp.broadcast_to(sees_recalled_Bx1xR, (B, len(inner), R)),
                    jnp.broadcast_to(among_inner, (B, *among_inner.shape)),
                ],
                axis=-1,
            )
            positions = jnp.broadcast_to(lengths_B[:, None] + depth, (B, len(inner)))
            parents = tree.inner_rank[tree.parent[inner]]
            logits_BxWxV, own_BxWxE, cache = features.extend(
                model,
                tokens[-1][:, inner - first],
                positions,
                visible,
                cache,
                int(pending),
                features_BxNxE=None if own_BxWxE is None else own_BxWxE[:, parents - parent_ranks[0]],
            )
            parent_ranks = ranks
    return Drafts(jnp.concatenate(tokens, axis=1), jnp.concatenate(laws, axis=1), cache)


def _recall(model: Model, R: int, text_BxT, root_B, cache: Cache, seen_BxRxE):
    """Runs the draft on the last R committed tokens; logits [B, 1, V] and features [B, 1, E] of the root, and the cache."""
    recalled_BxR = cache.lengths[:, None] + jnp.arange(R)
    if seen_BxRxE is not None:
        shifted_BxR = jnp.minimum(jnp.arange(R) + R - 1 - root_B[:, None], R - 1)
        seen_BxRxE = jnp.take_along_axis(seen_BxRxE, shifted_BxR[..., None], axis=1)
    return features.extend(
        model,
        jnp.take_along_axis(text_BxT, recalled_BxR, axis=1),
        recalled_BxR,
        jnp.broadcast_to(np.tri(R, dtype=bool), (len(root_B), R, R)),
        cache,
        features_BxNxE=seen_BxRxE,
        only_B=root_B,
    )


def commit(
    model: Model | Frozen,
    cache: Cache,
    tree: Tree,
    path_BxD: jax.Array,
    old_lengths_B: jax.Array,
    new_lengths_B: jax.Array,
) -> Cache:
    """Keeps the accepted path in the draft's cache, except its last node, which may be a leaf and is run again.

    A draft that sees features runs on all of it again, with the target's.

    Args:
      model: the draft model, or its frozen copy.
      cache: with the inner nodes of a drafted tree pending.
      tree: static.
      path_BxD: int32 accepted nodes, root excluded, in order; later entries are ignored.
      old_lengths_B: lengths of the sequences before the call.
      new_lengths_B: after it.
    """
    if features_seen(model):
        return Cache(cache.rows, committed_length(new_lengths_B, features.recalled(model, tree)))
    roots_B = old_lengths_B - 1 - cache.lengths
    index_D = jnp.arange(1, path_BxD.shape[1] + features.RECALLED)  # The first recalled row is in its place.
    below_root = index_D[None, :] - roots_B[:, None] - 1
    nodes = jnp.take_along_axis(path_BxD, jnp.clip(below_root, 0, path_BxD.shape[1] - 1), axis=1)
    pending = jnp.where(below_root < 0, index_D[None, :], features.RECALLED + jnp.asarray(tree.inner_rank)[nodes] - 1)
    return keep(cache, pending, committed_length(new_lengths_B), settled=1)


def _children(keys_B, rule, tree: Tree, nodes: np.ndarray, p_BxWxV: jax.Array) -> jax.Array:
    """Tokens [B, W'] of the `nodes` of a level, drawn from their parents' distributions `p_BxWxV`."""
    ranks, parents = tree.sibling_rank[nodes], tree.inner_rank[tree.parent[nodes]]
    parents = parents - parents.min()
    counts = np.bincount(parents)
    return jax.vmap(lambda key, p_WxV: rule(key, p_WxV, counts)[parents, ranks])(keys_B, p_BxWxV)


def _each(key, p_WxV, draw_children, *of_each) -> jax.Array:
    return jax.vmap(draw_children)(jax.random.split(key, len(p_WxV)), p_WxV, *of_each)
