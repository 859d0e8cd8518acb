"""Phase 1 of a call (draft): the draft model fills the tree level by level (SpecTr, section 7).

The draft model runs on the inner nodes, which have children. A rule draws the children of each.

Shape suffixes: B sequences, N drafted nodes, I inner nodes (root included), W inner nodes of a
level, V vocabulary, R recalled tokens.
"""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spectr_jax.decoding import features, processing
from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.tree import Keys, NodeTokens, Paths, PerRow, Tokens, Tree
from spectr_jax.models.base import Model, features_seen
from spectr_jax.models.cache import Cache, keep
from spectr_jax.models.frozen import Frozen
from spectr_jax.transport.rules import Rule

BatchProbs: TypeAlias = Float[Array, "batch width vocab"]


class Drafts(NamedTuple):
    """The drafts of one call."""

    tokens: NodeTokens  # int32; the root's is the last committed token.
    p: Float[Array, "batch inner vocab"]  # The draft distribution at each inner node.
    cache: Cache  # The draft model's, with the inner nodes pending.


def committed_length(lengths_B: PerRow, recalled: int = features.RECALLED) -> PerRow:
    """Returns the draft cache's length between calls, for sequences of `lengths_B` tokens."""
    return jnp.maximum(lengths_B - recalled, 0)


def draft(
    keys_B: Keys,
    model: Model,
    rule: Rule,
    tree: Tree,
    policy: Policy,
    tokens_BxT: Tokens,
    lengths_B: PerRow,
    cache: Cache,
    features_BxRxE: features.Recalled | None = None,
) -> Drafts:
    """Draws the tokens of the tree; consumes `keys_B`.

    The nodes at depth d, after n committed tokens, use `fold_in(key, n + d - 1)`. The draft model
    runs first on the last R committed tokens (`features.recalled`), so `cache` has the length
    `committed_length(lengths_B, R)`. `features_BxRxE` are the target's features for these tokens,
    if the draft sees any. The policy applies to the draft's logits.
    """
    # In a sequence shorter than R the root is not the last recalled slot; later slots are unused.
    R, root_B = features.recalled(model, tree), lengths_B - 1 - cache.lengths
    recalled_BxR = cache.lengths[:, None] + jnp.arange(R)
    if features_BxRxE is not None:
        shifted_BxR = jnp.minimum(jnp.arange(R) + R - 1 - root_B[:, None], R - 1)
        features_BxRxE = jnp.take_along_axis(features_BxRxE, shifted_BxR[..., None], axis=1)
    recalled = (
        jnp.take_along_axis(tokens_BxT, recalled_BxR, axis=1),
        jnp.minimum(recalled_BxR, model.context - 1),
        jnp.broadcast_to(np.tri(R, dtype=bool), (len(root_B), R, R)),
    )
    ran = _Ran(
        *features.extend(model, *recalled, cache, features_BxNxE=features_BxRxE, only_B=root_B)
    )
    tokens, p = [jnp.take_along_axis(tokens_BxT, lengths_B[:, None] - 1, axis=1)], []
    for depth, nodes in enumerate(tree.levels[1:]):
        parents = np.intersect1d(tree.levels[depth], tree.inner)
        committed = jnp.concatenate(tokens, axis=1), tokens_BxT, lengths_B
        logits = processing.at_nodes(policy, tree, parents, ran.logits, *committed)
        positions_B, pmf = lengths_B + depth, probabilities(logits, policy)
        if tokens_BxT.shape[1] > model.context:
            # The draft drafts nothing past its context: verifiers ignore drafts with p = 0.
            pmf = jnp.where(positions_B[:, None, None] <= model.context, pmf, 0)
        p.append(pmf)
        level_keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
        tokens.append(_children(level_keys_B, rule, tree, nodes, pmf))
        inner = np.intersect1d(nodes, tree.inner)
        if len(inner):
            inner_tokens = tokens[-1][:, inner - nodes[0]]
            ran = _run_on_level(model, tree, inner, inner_tokens, positions_B, root_B, ran)
    return Drafts(jnp.concatenate(tokens, axis=1), jnp.concatenate(p, axis=1), ran.cache)


class _Ran(NamedTuple):
    """The draft model's outputs for the root, or for the inner nodes of a level."""

    logits: BatchProbs  # Of the token after each node.
    own: Float[Array, "batch width features"] | None  # The draft's own features, if it sees any.
    cache: Cache  # With these nodes and those above them pending.


def _run_on_level(
    model: Model,
    tree: Tree,
    inner: Int[np.ndarray, " width"],
    tokens_BxW: Int[Array, "batch width"],
    positions_B: PerRow,
    root_B: PerRow,
    above: _Ran,
) -> _Ran:
    """Runs the draft on the `inner` nodes of a level, given its outputs for the level `above`."""
    (B, W), R = tokens_BxW.shape, features.recalled(model, tree)
    first, last = tree.inner_rank[inner[0]], tree.inner_rank[inner[-1]]
    parents = tree.parent[inner]
    inner_above = np.intersect1d(tree.levels[tree.depth[parents[0]]], tree.inner)
    own = None if above.own is None else above.own[:, np.searchsorted(inner_above, parents)]
    positions_B = jnp.minimum(positions_B, model.context - 1)
    # The pending rows are the R recalled tokens, then the inner nodes through this level.
    sees_recalled_BxR = jnp.arange(R) <= root_B[:, None]
    sees_inner = tree.ancestors[np.ix_(inner, tree.inner[1 : last + 1])]
    visible = (
        jnp.broadcast_to(sees_recalled_BxR[:, None, :], (B, W, R)),
        jnp.broadcast_to(sees_inner, (B, *sees_inner.shape)),
    )
    positions_BxW = jnp.broadcast_to(positions_B[:, None], (B, W))
    new = tokens_BxW, positions_BxW, jnp.concatenate(visible, axis=-1)
    pending = R + int(first) - 1
    return _Ran(*features.extend(model, *new, above.cache, pending, features_BxNxE=own))


def commit(
    model: Model | Frozen,
    cache: Cache,
    tree: Tree,
    path_BxD: Paths,
    old_lengths_B: PerRow,
    new_lengths_B: PerRow,
) -> Cache:
    """Keeps the accepted path, except its last node, in the draft's cache.

    The last node may be a leaf, on which the draft has not run, so the next call recalls it. A
    draft that sees features recalls all tokens that the call added, with the target's features.

    `model` may be frozen. The `cache` has the inner nodes of a drafted tree pending. The lengths
    are those of the sequences before and after the call.
    """
    if features_seen(model):
        return Cache(cache.rows, committed_length(new_lengths_B, features.recalled(model, tree)))
    roots_B = old_lengths_B - 1 - cache.lengths
    height = path_BxD.shape[1]
    # The first recalled row is already in place.
    index_D = jnp.arange(1, height + features.RECALLED)
    below_root = index_D[None, :] - roots_B[:, None] - 1
    nodes = jnp.take_along_axis(path_BxD, jnp.clip(below_root, 0, height - 1), axis=1)
    of_nodes = features.RECALLED + jnp.asarray(tree.inner_rank)[nodes] - 1
    pending = jnp.where(below_root < 0, index_D[None, :], of_nodes)
    return keep(cache, pending, committed_length(new_lengths_B), settled=1)


def _children(
    keys_B: Keys, rule: Rule, tree: Tree, nodes: Int[np.ndarray, " level"], p_BxWxV: BatchProbs
) -> Int[Array, "batch level"]:
    """Returns tokens for the `nodes` of a level, drawn from `p_BxWxV` at their parents."""
    ranks, parents = tree.sibling_rank[nodes], tree.inner_rank[tree.parent[nodes]]
    parents = parents - parents.min()
    counts = np.bincount(parents)
    return jax.vmap(lambda key, p_WxV: rule.draw(key, p_WxV, counts)[parents, ranks])(
        keys_B, p_BxWxV
    )
