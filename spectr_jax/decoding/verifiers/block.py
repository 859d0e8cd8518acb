r"""Phase 3 of a call (select): block verification along the path of the winners.

Token by token, a call ends at the first rejection. Block verification (Sun et al., 2024, arXiv
2403.10444) accepts a prefix of one chain jointly, and is never worse. A plan that names a winner
among several drafts extends it to many drafts. Given the node and its number k of live drafts, the
winner has a known distribution g, so the argument for one chain holds step by step with g instead
of the draft distribution. One chain gives block verification. The winner of the optimal plan
(`transport.otm`) gives `otm_block`, which at depth 1 is that plan. In greedy multi-path block
verification (`decoding/verifiers/multipath.py`), g is not conditioned on k.

Let $\rho_i$ (`run`) be the probability that the first i tokens of the path are all accepted, with
$\rho_0 = 1$. Let w be the winner at depth i, and q and g the distributions at its node:

$$r_i = (\rho_i \ q - g)_+, \qquad \rho_{i+1} = \min\left(1, \rho_i \frac{q(w)}{g(w)}\right).$$

$\tau$ starts at 0. At each depth i > 0 it is set to i with probability

$$\frac{\sum_x r_i(x)}{\sum_x r_i(x) + 1 - \rho_i}.$$

A path of length L is emitted whole with probability $\rho_L$, followed by a bonus token. Otherwise
its first $\tau$ tokens are emitted, followed by a draw from the normalised $r_\tau$.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers import base
from spectr_jax.decoding.verifiers.base import Candidates, Selection, Verifier
from spectr_jax.transport import rules
from spectr_jax.transport.base import Plan, or_else
from spectr_jax.transport.draws import uniform
from spectr_jax.transport.types import BoolScalar, FloatScalar, IntScalar, Probs
from spectr_jax.transport.winner import Winner, WinnerPlan
from spectr_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Block(Verifier):
    """Verifies the path of the plan's winners as a whole.

    Attributes:
      plan: a plan that names a winner among i.i.d. drafts.

    Raises:
      UserError: the plan names no such winner.
    """

    rule = rules.IID
    plan: Plan

    def __post_init__(self) -> None:
        if not isinstance(self.plan, WinnerPlan) or self.plan.rule != self.rule:
            hint = "use a plan that does, such as 'otm'"
            raise UserError(
                f"plan={getattr(self.plan, 'name', self.plan)!r}: names no winner of i.i.d. drafts; {hint}"
            )

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        assert isinstance(self.plan, WinnerPlan)
        return along_winners(key, scored, self.plan.win, lambda state, winner: (winner, state), ())


class _Node(NamedTuple):
    """The values at a node that do not depend on the path to it."""

    drafts: Candidates
    q: Probs
    uniforms: Float[Array, " k"]  # The winner's decides whether the path to it is accepted.
    prepared: Any  # The result of `prepare`.


class _Walk(NamedTuple):
    node: IntScalar
    run: FloatScalar  # rho
    uniform: FloatScalar  # Decides whether the path so far is accepted.
    best: IntScalar  # The node at depth tau.
    residual: Probs  # r_tau
    state: Any  # The state of `win`.


def along_winners(
    key: PRNGKeyArray,
    scored: ScoredTree,
    prepare: Callable[..., Any],
    win: Callable[[Any, Any], tuple[Winner, Any]],
    state: Any,
) -> Selection:
    """Returns the `Selection` of block verification along a path of winners. Consumes `key`.

    Args:
      key: the choice at depth d uses `fold_in(key, length + d)`.
      scored: a tree of i.i.d. drafts.
      prepare: (key, p, q, drafts, valid) -> prepared, the work at a node that does not depend on
        the path; the `win` of a plan, for example.
      win: (state, prepared) -> (winner, state): the winner at a node, with its distribution given
        the path to the node, and the state at the winner's node.
      state: a pytree of arrays, what `win` remembers of the path, at the root.
    """
    tree, depths = scored.tree, jnp.asarray(scored.tree.depth)
    below = base.candidates(scored, rules.IID)
    counts_N = base.counts(scored, below)

    def keys_at(depth: IntScalar) -> Key[Array, " 3"]:
        return jax.random.split(jax.random.fold_in(key, scored.length + depth), 3)

    def look(node: IntScalar) -> _Node:
        accept_key, _, win_key = keys_at(depths[node])
        drafts = below(node)
        p, q = scored.p_and_q(node, drafts.first())
        uniforms = uniform(accept_key, drafts.tokens.shape)
        prepared = prepare(win_key, p, q, drafts.tokens, drafts.valid)
        return _Node(drafts=drafts, q=q, uniforms=uniforms, prepared=prepared)

    node_at = base.at_nodes(scored, look)

    def step(walk: _Walk) -> _Walk:
        return _followed(tree, walk, node_at(walk.node), win)

    def alive(walk: _Walk) -> BoolScalar:
        # With run = 0 no longer prefix can be accepted.
        return (counts_N[walk.node] > 0) & (walk.run > 0)

    start = _Walk(
        node=jnp.int32(0),
        run=jnp.ones((), scored.logits.dtype),
        uniform=jnp.zeros((), scored.logits.dtype),
        best=jnp.int32(0),
        residual=jnp.zeros(scored.vocab_size, scored.logits.dtype),
        state=state,
    )
    end = base.repeat(scored, tree.height, alive, step, start)
    whole = end.uniform < end.run
    last = jnp.where(whole, end.node, end.best)
    weights = jnp.where(whole, scored.q(end.node), end.residual)
    token = base.last_token(keys_at(depths[last])[1], weights)
    return base.ending_at(scored, last, token, counts_N)


def _followed(
    tree: Tree, walk: _Walk, at: _Node, win: Callable[[Any, Any], tuple[Winner, Any]]
) -> _Walk:
    """Returns the walk after one more step along the path of winners."""
    drafts, q, uniforms, prepared = at
    (index, g), state = win(walk.state, prepared)
    token = drafts.tokens[index]
    residual = jnp.maximum(walk.run * q - g, 0)
    mass = base.residual_mass(residual, q, walk.run)
    here = (walk.node == 0) | (walk.uniform * (mass + (1 - walk.run)) < mass)
    tiny = jnp.finfo(g.dtype).tiny
    ratio = jnp.where(q[token] > 0, walk.run * q[token] / jnp.maximum(g[token], tiny), 0)
    return _Walk(
        node=drafts.carrying(tree, token)[0],
        run=jnp.minimum(ratio, 1),
        uniform=uniforms[index],
        best=jnp.where(here, walk.node, walk.best),
        residual=jnp.where(here, or_else(residual, q), walk.residual),
        state=state,
    )
