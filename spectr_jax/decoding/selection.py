"""Phase 3 of a call (select): walk down the tree, a token at a time (SpecTr, Algorithm 3; ERSD, Algorithms 4 and 5).

The state is the set of live nodes at a depth. They all spell the same tokens, so they share p and q, and the number of
their children is the k of the next choice. L counts drafted tokens, and a call that accepts all of them emits one more.

Shape suffixes: N drafted nodes, I inner nodes, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.tree import Tree
from spectr_jax.models.layers import cpu
from spectr_jax.transport.base import Plan, draw

SMALL_VOCABULARY = 64
"""Up to so many tokens, a step of a walk costs a CPU more to begin than to compute."""


class Selection(NamedTuple):
    """What one call emits for one sequence.

    Attributes:
      tokens: [height + 1] int32; entries from `emitted` on are unused.
      emitted: [] int32, the number of emitted tokens: the accepted drafts and one more, a correction or a bonus.
      path: [height] int32, the node of each accepted draft.
      drafts: [height + 1] int32, how many drafts there were for each token; 0 for a bonus.
    """

    tokens: jax.Array
    emitted: jax.Array
    path: jax.Array
    drafts: jax.Array


class _Walk(NamedTuple):
    depth: jax.Array
    node: jax.Array  # One of the live ones.
    live: jax.Array  # [N + 1] bool
    alive: jax.Array
    tokens: jax.Array
    path: jax.Array
    drafts: jax.Array


def select(
    key: jax.Array,
    plan: Plan,
    tree: Tree,
    policy: Policy,
    length: jax.Array,
    tokens: jax.Array,
    p: jax.Array,
    logits: jax.Array,
) -> Selection:
    """Chooses the tokens that one call emits, for one sequence.

    At a leaf no child is live, and a plan without drafts draws from q: that is the bonus token.

    Args:
      key: consumed; the choice at depth d uses `fold_in(key, length + d)`.
      plan: chooses one token.
      tree: static, N drafted nodes.
      policy: turns the target's logits into q, at the visited nodes only.
      length: [] int32, committed tokens of the sequence.
      tokens: [N + 1] int32 by node.
      p: [I, V] draft distributions at the inner nodes.
      logits: [N + 1, V] of the target.
    """

    def step(walk: _Walk) -> _Walk:
        children, valid = live_children(tree, plan, walk.node, walk.live, walk.depth)
        drafts = tokens[children]
        q = probabilities(logits[walk.node], policy)
        law = draft_law(tree, p, children[jnp.argmax(valid)], q)
        token = plan.select(jax.random.fold_in(key, length + walk.depth), law, q, drafts, valid).token
        carried = valid & (drafts == token)
        node = one_with_children(tree, children, carried)
        return _Walk(
            walk.depth + 1,
            node,
            marked(tree, children, carried),
            jnp.any(carried),
            walk.tokens.at[walk.depth].set(token),
            walk.path.at[walk.depth].set(node),
            walk.drafts.at[walk.depth].set(jnp.sum(valid)),
        )

    start = _Walk(
        jnp.zeros((), jnp.int32),
        jnp.zeros((), jnp.int32),
        jnp.arange(tree.size + 1) == 0,
        jnp.ones((), bool),
        *jnp.zeros((3, tree.height + 1), jnp.int32),
    )
    end = jax.lax.while_loop(lambda walk: walk.alive, step, start)
    # The last token is never a node.
    return Selection(end.tokens, end.depth, end.path[: tree.height], end.drafts)


def for_each_text(walk: Callable[..., Selection], plan: Plan, tree: Tree, policy: Policy) -> Callable[..., Selection]:
    """`walk` over a batch: a function of (done, key, length, tokens, p, logits), each with a leading B; `key` is consumed.

    Its result for a finished sequence is unused. A CPU takes the sequences in turn, so that none waits for a longer path
    of another; an accelerator, and a CPU with a small vocabulary, takes all at once.
    """

    def walk_one(key, length, *rest):
        return walk(key, plan, tree, policy, length, *rest)

    def unless_done(text):
        done, *arguments = text
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(walk_one, *arguments))
        return jax.lax.cond(done, lambda: nothing, lambda: walk_one(*arguments))

    def walk_all(done, *batch):
        if in_turn(batch[-1].shape[-1]):
            return jax.lax.map(unless_done, (done, *batch))
        return jax.vmap(walk_one)(*batch)

    return walk_all


def in_turn(vocab_size: int) -> bool:
    """Whether several walks, or nodes, are best taken one after the other: on a CPU, unless the vocabulary is small."""
    return cpu.on_cpu() and vocab_size > SMALL_VOCABULARY


def live_children(tree: Tree, plan: Plan, node, live, depth) -> tuple[jax.Array, jax.Array]:
    """The drafts for the next token, in the order in which they were drawn: nodes [k], and which of them are valid [k]."""
    if plan.drafts == "iid":
        children = jnp.asarray(tree.level_table)[depth + 1]
        return children, (children >= 0) & live[jnp.asarray(tree.parent)[children]]
    children = jnp.asarray(tree.children_table)[node]  # Siblings are distinct, so one node is live.
    return children, children >= 0


def ending_at(tree: Tree, tokens, node, token, drafts) -> Selection:
    """What a call emits that ends at `node`: the path to it and `token`; `drafts` [N + 1] were those of each node."""
    depth, path = jnp.asarray(tree.depth)[node], jnp.asarray(tree.paths)[node]
    above = jnp.concatenate([jnp.zeros(1, jnp.int32), path])
    chosen = jnp.append(tokens[path], 0).at[depth].set(token)
    return Selection(chosen, depth + 1, path, jnp.where(jnp.arange(tree.height + 1) <= depth, drafts[above], 0))


def drawable(tree: Tree, tokens, p) -> jax.Array:
    """[N + 1] bool: whether each node's token can be drawn from the draft distribution at its parent; not where that is
    none, as of logits that are NaN."""
    if not tree.size:
        return jnp.ones(1, bool)
    rows = jnp.asarray(tree.inner_rank)[jnp.asarray(tree.parent[1:])]
    return jnp.concatenate([jnp.ones(1, bool), p[rows, tokens[1:]] > 0])


def draft_law(tree: Tree, p, child, otherwise) -> jax.Array:
    """The draft distribution [V] that node `child` was drawn from; undefined if there is no child.

    It is looked up by the child, since some of the live nodes, which spell the same tokens, may be leaves.
    """
    return p[jnp.asarray(tree.inner_rank)[jnp.asarray(tree.parent)[child]]] if len(tree.inner) else otherwise


def last_token(key: jax.Array, weights: jax.Array) -> jax.Array:
    """A draw from `weights` [V], or -1 where none is positive, as of logits that are NaN; consumes `key`."""
    return jnp.where(jnp.any(weights > 0), draw(key, weights), -1)


def one_with_children(tree: Tree, nodes, chosen) -> jax.Array:
    """One of the `chosen` nodes, which spell the same tokens: one with children, if there is one.

    The draft model ran on nodes with children only. So the path goes through these, and its cache keeps their rows.
    """
    inner = jnp.asarray(np.isin(np.arange(tree.size + 1), tree.inner))
    return nodes[jnp.argmax(jnp.where(chosen, 1 + inner[nodes], 0))]


def marked(tree: Tree, nodes, chosen) -> jax.Array:
    """[N + 1] bool: the chosen ones of `nodes`."""
    return jnp.zeros(tree.size + 1, bool).at[jnp.where(chosen, nodes, tree.size + 1)].set(True, mode="drop")
