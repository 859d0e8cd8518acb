"""Phase 1 of a call: the draft model fills the tree, level by level (SpecTr, section 7).

The draft model runs on the nodes that have children, the inner ones, and a rule draws the children of each.

Shape suffixes: B sequences, N drafted nodes, I inner nodes (the root among them), W inner nodes of a level, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, Shaped

from spectr_jax.decoding import features, processing
from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.tree import Tree
from spectr_jax.models.base import Model, features_seen
from spectr_jax.models.cache import Cache, keep
from spectr_jax.models.frozen import Frozen
from spectr_jax.transport import race as race_plan
from spectr_jax.transport.base import draw
from spectr_jax.transport.types import IntScalar, Probs


class Drafts(NamedTuple):
    """What the draft model proposes.

    Attributes:
      tokens: [B, N + 1] int32 by node; the root's is the last committed token.
      p: [B, I, V] draft distribution at each inner node.
      cache: the draft model's KV cache, with the inner nodes pending.
    """

    tokens: Int[Array, "batch nodes"]
    p: Float[Array, "batch inner vocab"]
    cache: Cache


def iid(
    key: PRNGKeyArray, p: Float[Array, "width vocab"], counts: Int[np.ndarray, " width"]
) -> Int[Array, "width children"]:
    """Returns independent draws from each distribution in p; consumes `key`."""
    return _each(key, p, lambda k, probs: draw(k, probs, (int(counts.max()),)))


def without_replacement(
    key: PRNGKeyArray, p: Float[Array, "width vocab"], counts: Int[np.ndarray, " width"]
) -> Int[Array, "width children"]:
    """Returns distinct tokens for each node, drawn from p without replacement by one race per node (Gumbel top-k); consumes
    `key`.

    They follow the Plackett-Luce distribution: each is drawn from p without those before it. Once the support of p is
    exhausted, distinct tokens with p = 0 follow.
    """
    return _each(key, p, lambda k, probs: race_plan.arrivals(k, probs, int(counts.max())))


def race(
    key: PRNGKeyArray, p: Float[Array, "width vocab"], counts: Int[np.ndarray, " width"]
) -> Int[Array, "width children"]:
    """Returns what `without_replacement` does, with one race for all nodes of the level, which `transport.race` uses too."""
    return jax.vmap(lambda probs: race_plan.arrivals(key, probs, int(counts.max())))(p)


def greedy(
    key: PRNGKeyArray, p: Float[Array, "width vocab"], counts: Int[np.ndarray, " width"]
) -> Int[Array, "width children"]:
    """Returns for each node the likeliest tokens of p, and as its last child a draw from the others (Hu et al., 2025);
    consumes `key`."""

    def likeliest_and_one(
        key: PRNGKeyArray, probs: Probs, count: IntScalar
    ) -> Int[Array, " children"]:
        likeliest = jax.lax.top_k(probs, int(counts.max()) - 1)[1]
        is_likeliest = jnp.arange(int(counts.max())) < count - 1
        one = draw(
            key, probs.at[jnp.where(is_likeliest[:-1], likeliest, len(probs))].set(0, mode="drop")
        )
        return jnp.where(is_likeliest, jnp.append(likeliest, 0), one).astype(jnp.int32)

    return _each(key, p, likeliest_and_one, jnp.asarray(counts))


Rule: TypeAlias = Callable[
    [PRNGKeyArray, Float[Array, "width vocab"], Int[np.ndarray, " width"]],
    Int[Array, "width children"],
]

RULES: dict[str, Rule] = {
    "iid": iid,
    "without_replacement": without_replacement,
    "race": race,
    "greedy": greedy,
}
"""How the children of the W inner nodes of a level are drawn, by the name in `Plan.drafts`.

Each is a function of a key, the distributions p [W, V] and `counts` [W], the number of children of each node. It returns
[W, C] tokens, C the largest count; entries at and beyond a node's count are unused.
"""


def committed_length(
    lengths_B: Int[Array, " batch"], recalled: int = features.RECALLED
) -> Int[Array, " batch"]:
    """Returns the number of tokens that the draft's cache holds between calls, for sequences of these lengths."""
    return jnp.maximum(lengths_B - recalled, 0)


def draft(
    keys_B: Key[Array, " batch"],
    model: Model,
    rule: Rule,
    tree: Tree,
    policy: Policy,
    tokens_BxT: Int[Array, "batch time"],
    lengths_B: Int[Array, " batch"],
    cache: Cache,
    features_BxRxE: Float[Array, "batch recalled features"] | None = None,
) -> Drafts:
    """Draws the tokens of the tree.

    Args:
      keys_B: one typed key per sequence, consumed; depth d after n committed tokens uses `fold_in(key, n + d - 1)`.
      model: the draft model.
      rule: one of `RULES`.
      tree: static.
      policy: applied to the draft's logits.
      tokens_BxT: committed tokens, of `lengths_B` (at least 1) each.
      lengths_B: int32.
      cache: of length `committed_length(lengths_B, R)`, R as `features.recalled` says.
      features_BxRxE: the target's features that come with the last R tokens, for a draft that sees them.
    """
    # In a sequence shorter than R the root is an earlier one of the recalled slots, and the slots after it are unused.
    root_B = lengths_B - 1 - cache.lengths
    ran = _recall(model, features.recalled(model, tree), tokens_BxT, root_B, cache, features_BxRxE)
    tokens, p = [jnp.take_along_axis(tokens_BxT, lengths_B[:, None] - 1, axis=1)], []
    for depth, nodes in enumerate(tree.levels[1:]):
        parents = np.intersect1d(tree.levels[depth], tree.inner)
        drafted_BxN = jnp.concatenate(tokens, axis=1)
        logits = processing.at_nodes(
            policy, tree, parents, ran.logits, drafted_BxN, tokens_BxT, lengths_B
        )
        p.append(_within(model, probabilities(logits, policy), tokens_BxT, lengths_B + depth))
        level_keys_B = jax.vmap(jax.random.fold_in)(keys_B, lengths_B + depth)
        tokens.append(_children(level_keys_B, rule, tree, nodes, p[-1]))
        inner = np.intersect1d(nodes, tree.inner)
        if len(inner):
            positions_B = lengths_B + depth
            ran = _run_on_level(
                model, tree, inner, tokens[-1][:, inner - nodes[0]], positions_B, root_B, ran
            )
    return Drafts(jnp.concatenate(tokens, axis=1), jnp.concatenate(p, axis=1), ran.cache)


def _within(
    model: Model,
    p_BxWxV: Float[Array, "batch width vocab"],
    tokens_BxT: Array,
    positions_B: Int[Array, " batch"],
) -> Float[Array, "batch width vocab"]:
    """Returns `p_BxWxV` with 0 for positions past the draft's context: such drafts count as not drawn, in every verifier."""
    if tokens_BxT.shape[1] <= model.context:
        return p_BxWxV
    return jnp.where(positions_B[:, None, None] <= model.context, p_BxWxV, 0)


class _Ran(NamedTuple):
    """What the draft model returned for the root, or for the inner nodes of a level.

    Attributes:
      logits: of the token after each node.
      own: its own features of each node; None for a draft that sees none.
      cache: with these nodes, and those above them, pending.
    """

    logits: Float[Array, "batch width vocab"]
    own: Float[Array, "batch width features"] | None
    cache: Cache


def _recall(
    model: Model,
    R: int,
    tokens_BxT: Int[Array, "batch time"],
    root_B: Int[Array, " batch"],
    cache: Cache,
    features_BxRxE: Float[Array, "batch recalled features"] | None,
) -> _Ran:
    """Runs the draft on the last R committed tokens; returns what it says of the root."""
    recalled_BxR = cache.lengths[:, None] + jnp.arange(R)
    if features_BxRxE is not None:
        shifted_BxR = jnp.minimum(jnp.arange(R) + R - 1 - root_B[:, None], R - 1)
        features_BxRxE = jnp.take_along_axis(features_BxRxE, shifted_BxR[..., None], axis=1)
    return _Ran(
        *features.extend(
            model,
            jnp.take_along_axis(tokens_BxT, recalled_BxR, axis=1),
            jnp.minimum(recalled_BxR, model.context - 1),
            jnp.broadcast_to(np.tri(R, dtype=bool), (len(root_B), R, R)),
            cache,
            features_BxNxE=features_BxRxE,
            only_B=root_B,
        )
    )


def _run_on_level(
    model: Model,
    tree: Tree,
    inner: Int[np.ndarray, " width"],
    tokens_BxW: Int[Array, "batch width"],
    positions_B: Int[Array, " batch"],
    root_B: Int[Array, " batch"],
    above: _Ran,
) -> _Ran:
    """Runs the draft on the `inner` nodes of a level; `above` is what it returned for the inner nodes of the one above."""
    R = features.recalled(model, tree)
    first_rank = int(tree.inner_rank[inner[0]])
    return _Ran(
        *features.extend(
            model,
            tokens_BxW,
            jnp.broadcast_to(
                jnp.minimum(positions_B, model.context - 1)[:, None], tokens_BxW.shape
            ),
            _visible(tree, inner, R, root_B),
            above.cache,
            R + first_rank - 1,
            features_BxNxE=None
            if above.own is None
            else above.own[:, _parent_rank_in_level(tree, inner)],
        )
    )


def _visible(
    tree: Tree, inner: Int[np.ndarray, " width"], R: int, root_B: Int[Array, " batch"]
) -> Bool[Array, "batch width visible"]:
    """Returns which of the R recalled tokens and of the inner nodes so far, their own level's included, nodes see."""
    B, W = len(root_B), len(inner)
    sees_recalled_BxR = jnp.arange(R) <= root_B[:, None]
    among_inner = tree.ancestors[np.ix_(inner, tree.inner[1 : tree.inner_rank[inner[-1]] + 1])]
    return jnp.concatenate(
        [
            jnp.broadcast_to(sees_recalled_BxR[:, None, :], (B, W, R)),
            jnp.broadcast_to(among_inner, (B, *among_inner.shape)),
        ],
        axis=-1,
    )


def _parent_rank_in_level(
    tree: Tree, inner: Int[np.ndarray, " width"]
) -> Int[np.ndarray, " width"]:
    """Returns which of the inner nodes of the level above is the parent of each of the `inner` nodes of one level."""
    parents = tree.parent[inner]
    level_above = np.intersect1d(tree.levels[tree.depth[parents[0]]], tree.inner)
    rank: Int[np.ndarray, " width"] = np.searchsorted(level_above, parents)
    return rank


def commit(
    model: Model | Frozen,
    cache: Cache,
    tree: Tree,
    path_BxD: Int[Array, "batch height"],
    old_lengths_B: Int[Array, " batch"],
    new_lengths_B: Int[Array, " batch"],
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
    index_D = jnp.arange(
        1, path_BxD.shape[1] + features.RECALLED
    )  # The first recalled row is in its place.
    below_root = index_D[None, :] - roots_B[:, None] - 1
    nodes = jnp.take_along_axis(path_BxD, jnp.clip(below_root, 0, path_BxD.shape[1] - 1), axis=1)
    pending = jnp.where(
        below_root < 0,
        index_D[None, :],
        features.RECALLED + jnp.asarray(tree.inner_rank)[nodes] - 1,
    )
    return keep(cache, pending, committed_length(new_lengths_B), settled=1)


def _children(
    keys_B: Key[Array, " batch"],
    rule: Rule,
    tree: Tree,
    nodes: Int[np.ndarray, " level"],
    p_BxWxV: Float[Array, "batch width vocab"],
) -> Int[Array, "batch level"]:
    """Returns the tokens of the `nodes` of a level, drawn from their parents' distributions `p_BxWxV`."""
    ranks, parents = tree.sibling_rank[nodes], tree.inner_rank[tree.parent[nodes]]
    parents = parents - parents.min()
    counts = np.bincount(parents)
    return jax.vmap(lambda key, p_WxV: rule(key, p_WxV, counts)[parents, ranks])(keys_B, p_BxWxV)


def _each(
    key: PRNGKeyArray,
    p_WxV: Float[Array, "width vocab"],
    draw_children: Callable[..., Int[Array, " children"]],
    *of_each: Shaped[Array, "width ..."],
) -> Int[Array, "width children"]:
    """Returns what `draw_children` draws for each node with a key of its own; consumes `key`."""
    return jax.vmap(draw_children)(jax.random.split(key, len(p_WxV)), p_WxV, *of_each)
