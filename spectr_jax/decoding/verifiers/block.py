r"""Phase 3 of a call (select), on whole paths: block verification along the path of the winners.

Token by token, a call ends at the first rejection. Block verification (Sun et al., 2024, arXiv 2403.10444) accepts a
prefix of one chain jointly, and is never worse. A plan that names a winner among several drafts, of a known distribution
g, extends it to many drafts: given the node and the number k of live drafts, the next token on the path of winners is
distributed as g, so the argument for one chain holds step by step with g in place of the draft distribution. With one
chain it is block verification; with the winner of the optimal plan (`transport.otm`) it is `otm_block`, which at depth 1
is that plan. In greedy multi-path block verification (`decoding/verifiers/multipath.py`) g is not conditioned on the number
of live drafts.

Let $\rho_i$ (`run`) be the probability that the first i tokens of the path are accepted whole, $\rho_0 = 1$, and w the
winner at depth i, where q and g are the distributions at that node:

$$r_i = (\rho_i \ q - g)_+, \qquad \rho_{i+1} = \min\left(1, \rho_i \frac{q(w)}{g(w)}\right).$$

tau starts at 0. At each depth i > 0 it is set to i with probability

$$\frac{\sum_x r_i(x)}{\sum_x r_i(x) + 1 - \rho_i}.$$

At the end of the path, of length L, all of it and a bonus token are emitted with probability $\rho_L$, else its first tau
tokens and a draw from $r_\tau$, normalised.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.verifiers.base import (
    Candidates,
    Selection,
    Verifier,
    at_nodes,
    candidates,
    last_token,
    repeat,
    residual_mass,
)
from spectr_jax.transport.base import Plan, or_else
from spectr_jax.transport.types import FloatScalar, IntScalar, Probs
from spectr_jax.transport.winner import Winner
from spectr_jax.utils.errors import UserError

Prepared = TypeVar("Prepared")
Known = TypeVar("Known")


@dataclasses.dataclass(frozen=True)
class Block(Verifier):
    """Verifies the path of the plan's winners as a whole.

    Attributes:
      plan: names a winner among i.i.d. drafts (`Plan.win`).
    """

    statistic = "winners"
    rule = "iid"
    plan: Plan

    def __post_init__(self) -> None:
        if self.plan.winner is None or self.plan.drafts != self.rule:
            raise UserError(
                f"plan={self.plan.name!r}: names no winner among i.i.d. drafts; give one that does, such as 'otm'"
            )

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        """See `Verifier`. Consumes `key`."""

        def follow(known: tuple[()], winner: Winner) -> tuple[IntScalar, Probs, tuple[()]]:
            return winner.draft, winner.pmf, known

        return along_winners(key, scored, self.plan.win, follow, ())


class _Node(NamedTuple):
    """What is known at a node, whatever the path to it.

    Attributes:
      drafts: the candidates.
      q: [V] target distribution.
      uniforms: [k]; that of the winner decides whether the path to it is accepted.
      prepared: what `win_at` returned.
    """

    drafts: Candidates
    q: Probs
    uniforms: Float[Array, " k"]
    prepared: Any


class _Walk(NamedTuple):
    depth: IntScalar
    node: IntScalar
    run: FloatScalar  # rho
    uniform: FloatScalar  # Decides whether the path so far is accepted.
    tau: IntScalar
    residual: Probs  # r_tau
    tokens: Int[Array, " steps"]
    path: Int[Array, " steps"]
    drafts: Int[Array, " steps"]
    known: Any  # What `follow` knows of the path so far.


def along_winners(
    key: PRNGKeyArray,
    scored: ScoredTree,
    win_at: Callable[[PRNGKeyArray, Probs, Probs, Int[Array, " k"], Bool[Array, " k"]], Prepared],
    follow: Callable[[Known, Prepared], tuple[IntScalar, Probs, Known]],
    known: Known,
) -> Selection:
    """Returns what block verification emits along a path of winners, whoever names them. Consumes `key`.

    Args:
      key: the choice at depth d uses `fold_in(key, length + d)`.
      scored: with i.i.d. drafts.
      win_at: function of (key, p, q, drafts, valid) at a node that returns what `follow` needs, whatever the path.
      follow: function of what is known on the path and of what `win_at` returned. It returns the index of the winning
        draft, the distribution [V] of its token given all that was known, and what is known at the next node.
      known: arrays, what is known at the root.
    """
    tree, depths = scored.tree, jnp.asarray(scored.tree.depth)
    below = candidates(scored, "iid")
    open_N = jax.vmap(lambda node: jnp.any(below(node).valid))(jnp.arange(tree.size + 1))

    def keys_at(depth: IntScalar) -> Key[Array, " 3"]:
        return jax.random.split(jax.random.fold_in(key, scored.length + depth), 3)

    def look(node: IntScalar) -> _Node:
        accept_key, _, win_key = keys_at(depths[node])
        drafts = below(node)
        p, q = scored.p_and_q(node, drafts.first())
        uniforms = jax.random.uniform(accept_key, drafts.tokens.shape, p.dtype)
        return _Node(
            drafts=drafts,
            q=q,
            uniforms=uniforms,
            prepared=win_at(win_key, p, q, drafts.tokens, drafts.valid),
        )

    node_at = at_nodes(scored, look)

    def step(walk: _Walk) -> _Walk:
        drafts, q, uniforms, prepared = node_at(walk.node)
        winner, g, known = follow(walk.known, prepared)
        token = drafts.tokens[winner]
        residual = jnp.maximum(walk.run * q - g, 0)
        mass = residual_mass(residual, q, walk.run)
        here = (walk.depth == 0) | (walk.uniform * (mass + (1 - walk.run)) < mass)
        ratio = jnp.where(
            q[token] > 0, walk.run * q[token] / jnp.maximum(g[token], jnp.finfo(g.dtype).tiny), 0
        )
        node, _ = drafts.carrying(tree, token)
        return _Walk(
            depth=walk.depth + 1,
            node=node,
            run=jnp.minimum(ratio, 1),
            uniform=uniforms[winner],
            tau=jnp.where(here, walk.depth, walk.tau),
            residual=jnp.where(here, or_else(residual, q), walk.residual),
            tokens=walk.tokens.at[walk.depth].set(token),
            path=walk.path.at[walk.depth].set(node),
            drafts=walk.drafts.at[walk.depth].set(jnp.sum(drafts.valid)),
            known=known,
        )

    # Once run is 0 no longer prefix can be accepted.
    start = _start(scored, known)
    end = repeat(scored, tree.height, lambda walk: open_N[walk.node] & (walk.run > 0), step, start)
    whole = end.uniform < end.run
    last = jnp.where(whole, end.depth, end.tau)
    token = last_token(keys_at(last)[1], jnp.where(whole, scored.q(end.node), end.residual))
    return Selection(
        tokens=end.tokens.at[last].set(token),
        emitted=last + 1,
        path=end.path[:-1],
        drafts=end.drafts,
    )


def _start(scored: ScoredTree, known: Any) -> _Walk:
    """Returns the walk at the root, with nothing accepted."""
    zero, by_depth = jnp.zeros((), jnp.int32), jnp.zeros(scored.tree.height + 1, jnp.int32)
    return _Walk(
        depth=zero,
        node=zero,
        run=jnp.ones((), scored.p.dtype),
        uniform=jnp.zeros((), scored.p.dtype),
        tau=zero,
        residual=jnp.zeros(scored.vocab_size, scored.p.dtype),
        tokens=by_depth,
        path=by_depth,
        drafts=by_depth,
        known=known,
    )
