r"""Phase 3 of a call (select), on whole paths: block verification along the path of the winners.

Token by token, a call ends at the first rejection. Block verification (Sun et al., 2024, arXiv 2403.10444) accepts a
prefix of one chain jointly, and is never worse. A plan that names a winner among several drafts, of a known distribution
g, extends it to many drafts: given the node and the number k of live drafts, the next token on the path of winners is
distributed as g, so the argument for one chain holds step by step with g in place of the draft distribution. With one
chain it is block verification; with the winner of the optimal plan (`transport.otm`) it is `otm_block`, which at depth 1
is that plan. Greedy multi-path block verification (`decoding/walks/multipath.py`) knows less: g is not given the number of
live drafts.

Let $\rho_i$ (`run`) be the probability that the first i tokens of the path are accepted whole, $\rho_0 = 1$, and w the
winner at depth i, where q and g are the distributions at that node:

$$r_i = (\rho_i \ q - g)_+, \qquad \rho_{i+1} = \min\left(1, \rho_i \frac{q(w)}{g(w)}\right).$$

tau starts at 0. At each depth i > 0 it is set to i with probability

$$\frac{\sum_x r_i(x)}{\sum_x r_i(x) + 1 - \rho_i}.$$

At the end of the path, of length L, all of it and a bonus token are emitted with probability $\rho_L$, else its first tau
tokens and a draw from $r_\tau$, normalised.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.selection import (
    Selection,
    draft_law,
    drawable,
    last_token,
    live_children,
    marked,
    one_with_children,
)
from spectr_jax.decoding.tree import Tree
from spectr_jax.transport.base import Plan, or_else


class _Walk(NamedTuple):
    depth: jax.Array
    node: jax.Array  # One of the live ones.
    live: jax.Array  # [N + 1] bool
    run: jax.Array
    uniform: jax.Array  # Decides whether the path so far is accepted.
    tau: jax.Array
    residual: jax.Array  # [V] r_tau
    tokens: jax.Array
    path: jax.Array
    drafts: jax.Array
    known: Any  # What `win` knows of the path so far.


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
    """As `selection.select`, for a plan that names a winner and whose drafts are i.i.d. Consumes `key`."""

    def win(known, *given):
        return plan.win(*given), known

    return along_winners(key, win, (), plan, tree, policy, length, tokens, p, logits)


def along_winners(
    key: jax.Array,
    win: Callable,
    known: Any,
    plan: Plan,
    tree: Tree,
    policy: Policy,
    length: jax.Array,
    tokens: jax.Array,
    p: jax.Array,
    logits: jax.Array,
) -> Selection:
    """Block verification along a path of winners, whoever names them. Consumes `key`.

    Args:
      key: as in `selection.select`.
      win: of (known, key, p, q, drafts, valid), returns a `Winner` and what is known at the next node. Its law g is that of
        the winner's token given all that was known on the path so far.
      known: arrays, what is known at the root.
      plan: i.i.d., and so on: as in `selection.select`.
    """
    usable = drawable(tree, tokens, p)
    has_children = jnp.zeros(tree.size + 1, bool).at[jnp.asarray(tree.parent[1:])].max(usable[1:])

    def step(walk: _Walk) -> _Walk:
        children, valid = live_children(tree, plan, walk.node, walk.live, walk.depth)
        drafts, valid, q = tokens[children], valid & usable[children], probabilities(logits[walk.node], policy)
        accept_key, _, win_key = jax.random.split(jax.random.fold_in(key, length + walk.depth), 3)
        law = draft_law(tree, p, children[jnp.argmax(valid)], q)
        (winner, g), known = win(walk.known, win_key, law, q, drafts, valid)

        residual = jnp.maximum(walk.run * q - g, 0)
        mass = jnp.sum(residual)
        here = (walk.depth == 0) | (walk.uniform * (mass + (1 - walk.run)) < mass)

        token = drafts[winner]
        carried = valid & (drafts == token)
        node = one_with_children(tree, children, carried)
        ratio = jnp.where(q[token] > 0, walk.run * q[token] / jnp.maximum(g[token], jnp.finfo(g.dtype).tiny), 0)
        return _Walk(
            walk.depth + 1,
            node,
            marked(tree, children, carried),
            jnp.minimum(ratio, 1),
            jax.random.uniform(accept_key, drafts.shape, p.dtype)[winner],
            jnp.where(here, walk.depth, walk.tau),
            jnp.where(here, or_else(residual, q), walk.residual),
            walk.tokens.at[walk.depth].set(token),
            walk.path.at[walk.depth].set(node),
            walk.drafts.at[walk.depth].set(jnp.sum(valid)),
            known,
        )

    start = _start(tree, known, p.dtype, logits.shape[-1])
    # Once run is 0 no longer prefix can be accepted.
    end = jax.lax.while_loop(lambda walk: jnp.any(walk.live & has_children) & (walk.run > 0), step, start)
    return _emitted(key, end, probabilities(logits[end.node], policy), length)


def _emitted(key, end: _Walk, bonus_law, length) -> Selection:
    """What a call emits whose walk came to its `end`, where a bonus token has the distribution `bonus_law` [V]."""
    whole = end.uniform < end.run
    last = jnp.where(whole, end.depth, end.tau)
    _, residual_key, _ = jax.random.split(jax.random.fold_in(key, length + last), 3)
    token = last_token(residual_key, jnp.where(whole, bonus_law, end.residual))
    return Selection(end.tokens.at[last].set(token), last + 1, end.path[:-1], end.drafts)


def _start(tree: Tree, known: Any, dtype, vocab_size: int) -> _Walk:
    zero, by_depth = jnp.zeros((), jnp.int32), jnp.zeros(tree.height + 1, jnp.int32)
    return _Walk(
        depth=zero,
        node=zero,
        live=jnp.arange(tree.size + 1) == 0,
        run=jnp.ones((), dtype),
        uniform=jnp.zeros((), dtype),
        tau=zero,
        residual=jnp.zeros(vocab_size, dtype),
        tokens=by_depth,
        path=by_depth,
        drafts=by_depth,
        known=known,
    )
