r"""Phase 3 of a call (select): traversal verification (Weng et al., 2025, arXiv 2505.12398).

Drafts are verified from the leaves to the root. Nodes are visited depth first, siblings in the
order in which they were drawn without replacement, and each node is decided after its children. A
node u has a score $r_u$, a distribution $q_u$ of the next token and the draft distribution $p_u$ of
its next child. Initially $q_u$ is the target's, $p_u$ is the draft's, and the root has score 1. A
child with token x starts with

$$r = \min\left(1, \frac{r_u \ q_u(x)}{p_u(x)}\right).$$

Once all its children are rejected, a node is accepted with probability r: the call emits the path
to it and a token drawn from its q. Otherwise its parent u is updated for the next sibling to

$$q_u' = N (r_u q_u - p_u)_+, \qquad
r_u' = \frac{\sum (r_u q_u - p_u)_+}{\sum (r_u q_u - p_u)_+ + 1 - r_u}, \qquad
p_u' = N (p_u \text{ without } x),$$

where N normalises. The root is accepted if no other node is. On a chain this is block verification.

Drafts may be i.i.d. instead (`rule`; Thomas et al., 2026, arXiv 2602.16994, compare this variant).
Then p stays as it is after a rejection, and nodes that spell the same tokens count as one node with
the children of all. This is exact, because the probability that the output passes through a node is
its initial score, however many drafts are below it. A repeated sibling is visited, but its score is
0.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.verifiers import base
from spectr_jax.decoding.verifiers.base import Selection, Verifier
from spectr_jax.transport import rules
from spectr_jax.transport.base import normalised, or_else
from spectr_jax.transport.draws import uniform
from spectr_jax.transport.rules import Rule
from spectr_jax.transport.types import BoolScalar, IntScalar
from spectr_jax.utils.errors import UserError


class _State(NamedTuple):
    """The state of the traversal. Rows belong to the depths 0..height of the current path."""

    visit: IntScalar  # The index of the next visit.
    accepted: BoolScalar  # Whether the last node was accepted.
    score: Float[Array, " steps"]  # r
    q: Float[Array, "steps vocab"]  # The distribution of the next token.
    p: Float[Array, "steps vocab"]  # The draft distribution of the next child.


@dataclasses.dataclass(frozen=True)
class Traversal(Verifier):
    """Verifies from the leaves to the root.

    Attributes:
      rule: how siblings are drawn, without replacement or i.i.d.

    Raises:
      UserError: siblings are drawn by another rule.
    """

    rule: Rule = rules.WITHOUT_REPLACEMENT

    def __post_init__(self) -> None:
        known = (rules.WITHOUT_REPLACEMENT, rules.IID)
        if self.rule not in known:
            raise UserError(f"rule={self.rule!r}: must be one of {known}")

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        tree, depths = scored.tree, jnp.asarray(scored.tree.depth)
        nodes, begins = _visits(scored)
        accept_key, token_key = jax.random.split(jax.random.fold_in(key, scored.length))
        # The root is always accepted.
        uniforms = uniform(accept_key, (tree.size + 1,)).at[0].set(-1)

        def step(state: _State) -> _State:
            node, begin = nodes[state.visit], begins[state.visit]
            end = functools.partial(_ended, self.rule, uniforms)
            state = jax.lax.cond(begin, _begun, end, scored, state, node)
            return state._replace(visit=state.visit + 1)

        rows = jnp.zeros((tree.height + 1, scored.vocab_size), scored.logits.dtype)
        start = _State(
            visit=jnp.int32(0), accepted=jnp.zeros((), bool), score=rows[:, 0], q=rows, p=rows
        )
        last = base.repeat(scored, len(nodes), lambda state: ~state.accepted, step, start)
        node = nodes[last.visit - 1]
        counts = base.counts(scored, base.candidates(scored, self.rule))
        token = base.last_token(token_key, last.q[depths[node]])
        return base.ending_at(scored, node, token, counts)


def _begun(scored: ScoredTree, state: _State, node: IntScalar) -> _State:
    """Returns the state with the distributions of `node`, and its score given its parent's."""
    depth, token = jnp.asarray(scored.tree.depth)[node], scored.tokens[node]
    above = jnp.maximum(depth - 1, 0)
    chance, wanted = state.p[above, token], state.score[above] * state.q[above, token]
    drawable = (chance > 0) & (node > 0)
    ratio = jnp.minimum(wanted / jnp.where(chance > 0, chance, 1), 1)
    scores = state.score.at[depth].set(jnp.where(drawable, ratio, node == 0))
    first_child = jnp.asarray(np.maximum(scored.tree.children_table[:, 0], 0))[node]
    p, q = scored.p_and_q(node, first_child)
    return state._replace(score=scores, q=state.q.at[depth].set(q), p=state.p.at[depth].set(p))


def _ended(
    rule: Rule, uniforms: Float[Array, " nodes"], scored: ScoredTree, state: _State, node: IntScalar
) -> _State:
    """Returns the state after the decision on `node`; if it is rejected, its parent is updated."""
    depth, token = jnp.asarray(scored.tree.depth)[node], scored.tokens[node]
    above = jnp.maximum(depth - 1, 0)
    accepted = uniforms[node] < state.score[depth]
    p, q, score = state.p[above], state.q[above], state.score[above]
    residual = jnp.maximum(score * q - p, 0)
    mass = base.residual_mass(residual, q, score)
    lost = ~accepted & (p[token] > 0)  # A draft that p cannot draw carries no information.
    rest = normalised(p.at[token].set(0)) if rule.distinct else p
    left = jnp.where(mass > 0, mass / jnp.maximum(mass + (1 - score), jnp.finfo(p.dtype).tiny), 0)
    return state._replace(
        accepted=accepted,
        score=state.score.at[above].set(jnp.where(lost, jnp.minimum(left, 1), score)),
        q=state.q.at[above].set(jnp.where(lost, normalised(or_else(residual, q)), q)),
        p=state.p.at[above].set(jnp.where(lost, rest, p)),
    )


def _visits(scored: ScoredTree) -> tuple[Int[Array, " visits"], Bool[Array, " visits"]]:
    """Returns the node of each visit, depth first, and whether it is the first visit of that node.

    A node is visited before its children, to get its score, and after them, to be decided. Of nodes
    that spell the same tokens, one with children, if there is any, gets the children of all and the
    place of the first.
    """
    if not scored.tree.size:
        return jnp.zeros(2, jnp.int32), jnp.array([True, False])
    tree, alike = scored.tree, scored.spelled_alike()
    nodes, depth, above = np.arange(tree.size + 1), tree.depth[:, None], np.arange(tree.height) + 1
    first = jnp.argmax(alike, axis=1)
    chosen = jnp.argmax(alike * (1 + tree.is_inner), axis=1)
    place = jnp.where(nodes == chosen, first, jnp.where(nodes == first, chosen, nodes))
    # Visits are sorted by their paths, in which 0 comes before all children and N + 1 after them.
    path = jnp.where(above < depth, first[tree.paths], place[tree.paths])
    begin, end = (jnp.where(above <= depth, path, pad) for pad in (0, tree.size + 1))
    order = jnp.lexsort(jnp.concatenate([begin, end]).T[::-1])
    return order % len(nodes), order < len(nodes)
