"""Draws a tree from a model, level by level (SpecTr, section 7).

The model runs on the inner nodes, which have children. A rule draws the children of each.

Shape suffixes: B sequences, N drafted nodes, I inner nodes (root included), W inner nodes of a
level, V vocabulary, R recalled tokens, F features.
"""

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spectr_jax.decoding import processing
from spectr_jax.decoding.drafters.base import Sequences, Setup
from spectr_jax.decoding.policy import shaped
from spectr_jax.decoding.running import run
from spectr_jax.decoding.tree import Keys, NodeTokens, PerRow, Tree
from spectr_jax.models.cache import Cache
from spectr_jax.transport.rules import Rule
from spectr_jax.utils import backend

BatchProbs: TypeAlias = Float[Array, "batch width vocab"]

HALVED = 100_000
"""The smallest vocabulary for which an accelerator keeps draft distributions in bfloat16."""

RECALLED = 2
"""The number of committed tokens on which a draft model runs first in each call.

It has not run on the last token, nor on the token before it if that was an accepted leaf.
"""


def cache_lengths(lengths_B: PerRow, recalled: int = RECALLED) -> PerRow:
    """Returns the lengths of the model's cache between calls, for sequences of `lengths_B`."""
    return jnp.maximum(lengths_B - recalled, 0)


def root_index(lengths_B: PerRow, cache: Cache) -> PerRow:
    """Returns which of the recalled tokens is the last committed token, the root of the tree."""
    return lengths_B - 1 - cache.lengths


def draw(
    setup: Setup,
    keys_B: Keys,
    model: Any,
    sequences: Sequences,
    cache: Cache,
    recalled: int = RECALLED,
    features_BxRxF: Float[Array, "batch recalled features"] | None = None,
) -> tuple[NodeTokens, BatchProbs, Cache]:
    """Draws the tokens of the tree from `model`; consumes `keys_B`.

    The children of nodes at depth d, after n committed tokens, use `fold_in(key, n + d)`, as the
    verifiers do. The model runs first on the last R = `recalled` committed tokens, so `cache` has
    `cache_lengths(lengths, R)`. `features_BxRxF` are the target's features for these tokens, if the
    model sees any. In a sequence shorter than R, the root is not the last of the R tokens, and
    later ones are unused.

    Returns:
      tokens [B, N + 1], p [B, I, V], and the cache with the inner nodes pending.
    """
    tree, rule, (tokens_BxT, lengths_B) = setup.tree, setup.verifier.rule, sequences
    assert rule is not None
    root_B = root_index(lengths_B, cache)
    index_BxR = cache.lengths[:, None] + jnp.arange(recalled)
    last = (
        jnp.take_along_axis(tokens_BxT, index_BxR, axis=1),
        jnp.minimum(index_BxR, model.context - 1),
        jnp.broadcast_to(np.tri(recalled, dtype=bool), (len(root_B), recalled, recalled)),
    )
    ran = _Ran(*run(model, *last, cache, features_BxNxE=features_BxRxF, only_B=root_B))
    tokens, p = [sequences.last()], []
    for depth, nodes in enumerate(tree.levels[1:]):
        parents = np.intersect1d(tree.levels[depth], tree.inner)
        drafted = jnp.concatenate(tokens, axis=1)
        process = setup.draft_policy.process
        logits = processing.processed(process, tree, parents, ran.logits, drafted, *sequences)
        positions_B, pmf = lengths_B + depth, shaped(logits, setup.draft_policy.shaping)
        if tokens_BxT.shape[1] > model.context:
            # The draft drafts nothing past its context: verifiers ignore drafts with p = 0.
            pmf = jnp.where(positions_B[:, None, None] <= model.context, pmf, 0)
        pmf = stored(pmf)
        p.append(pmf)
        level_keys_B = jax.vmap(jax.random.fold_in)(keys_B, positions_B)
        tokens.append(_children(level_keys_B, rule, tree, nodes, pmf))
        inner = np.intersect1d(nodes, tree.inner)
        if len(inner):
            inner_tokens = tokens[-1][:, inner - nodes[0]]
            level = inner, inner_tokens, positions_B
            ran = _run_on_level(model, tree, recalled, *level, root_B, ran)
    return jnp.concatenate(tokens, axis=1), jnp.concatenate(p, axis=1), ran.cache


def stored(pmf: BatchProbs) -> BatchProbs:
    """Returns draft distributions in the precision in which drafts are drawn and verified.

    With a large vocabulary an accelerator takes bfloat16, which halves the largest table after the
    logits. Any draft distribution is exact. Rounding changes each probability by at most one part
    in 512, and so the acceptance by at most 0.2 %.
    """
    halved = pmf.shape[-1] >= HALVED and not backend.on_cpu()
    return pmf.astype(jnp.bfloat16) if halved else pmf


class _Ran(NamedTuple):
    """The model's outputs for the root, or for the inner nodes of a level."""

    logits: BatchProbs  # Of the token after each node.
    features: Float[Array, "batch width features"] | None  # The draft's, if it sees the target's.
    cache: Cache  # With these nodes and those above them pending.


def _run_on_level(
    model: Any,
    tree: Tree,
    recalled: int,
    inner: Int[np.ndarray, " width"],
    tokens_BxW: Int[Array, "batch width"],
    positions_B: PerRow,
    root_B: PerRow,
    above: _Ran,
) -> _Ran:
    """Runs the model on the `inner` nodes of a level, given its outputs for the level `above`."""
    B, W = tokens_BxW.shape
    first, last = tree.inner_rank[inner[0]], tree.inner_rank[inner[-1]]
    parents = tree.parent[inner]
    inner_above = np.intersect1d(tree.levels[tree.depth[parents[0]]], tree.inner)
    features = above.features
    if features is not None:
        features = features[:, np.searchsorted(inner_above, parents)]
    positions_B = jnp.minimum(positions_B, model.context - 1)
    # The pending rows are the recalled tokens, then the inner nodes through this level.
    sees_recalled_BxR = jnp.arange(recalled) <= root_B[:, None]
    sees_inner = tree.ancestors[np.ix_(inner, tree.inner[1 : last + 1])]
    visible = (
        jnp.broadcast_to(sees_recalled_BxR[:, None, :], (B, W, recalled)),
        jnp.broadcast_to(sees_inner, (B, *sees_inner.shape)),
    )
    positions_BxW = jnp.broadcast_to(positions_B[:, None], (B, W))
    new = tokens_BxW, positions_BxW, jnp.concatenate(visible, axis=-1)
    pending = recalled + int(first) - 1
    return _Ran(*run(model, *new, above.cache, pending, features_BxNxE=features))


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
