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
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers import base
from spectr_jax.decoding.verifiers.base import Selection, Verifier
from spectr_jax.transport import rules
from spectr_jax.transport.base import normalised, or_else
from spectr_jax.transport.draws import uniform
from spectr_jax.transport.types import BoolScalar, IntScalar


class _State(NamedTuple):
    """The state of the traversal. Rows belong to the depths 0..height of the current path."""

    visit: IntScalar  # The index of the next visit.
    accepted: BoolScalar  # Whether the last node was accepted.
    score: Float[Array, " steps"]  # r
    q: Float[Array, "steps vocab"]  # The distribution of the next token.
    p: Float[Array, "steps vocab"]  # The draft distribution of the next child.


@dataclasses.dataclass(frozen=True)
class Traversal(Verifier):
    """Verifies from the leaves to the root, for drafts without replacement."""

    rule = rules.WITHOUT_REPLACEMENT

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        tree, depths = scored.tree, jnp.asarray(scored.tree.depth)
        nodes, begins = map(jnp.asarray, _visits(tree))
        accept_key, token_key = jax.random.split(jax.random.fold_in(key, scored.length))
        # The root is always accepted.
        uniforms = uniform(accept_key, (tree.size + 1,)).at[0].set(-1)

        def step(state: _State) -> _State:
            node, begin = nodes[state.visit], begins[state.visit]
            end = functools.partial(_ended, uniforms)
            state = jax.lax.cond(begin, _begun, end, scored, state, node)
            return state._replace(visit=state.visit + 1)

        rows = jnp.zeros((tree.height + 1, scored.vocab_size), scored.logits.dtype)
        start = _State(
            visit=jnp.int32(0), accepted=jnp.zeros((), bool), score=rows[:, 0], q=rows, p=rows
        )
        last = base.repeat(scored, len(nodes), lambda state: ~state.accepted, step, start)
        node = nodes[last.visit - 1]
        children = jnp.asarray(np.sum(tree.children_table >= 0, axis=1, dtype=np.int32))
        token = base.last_token(token_key, last.q[depths[node]])
        return base.ending_at(scored, node, token, children)


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
    uniforms: Float[Array, " nodes"], scored: ScoredTree, state: _State, node: IntScalar
) -> _State:
    """Returns the state after the decision on `node`; if it is rejected, its parent is updated."""
    depth, token = jnp.asarray(scored.tree.depth)[node], scored.tokens[node]
    above = jnp.maximum(depth - 1, 0)
    accepted = uniforms[node] < state.score[depth]
    p, q, score = state.p[above], state.q[above], state.score[above]
    residual = jnp.maximum(score * q - p, 0)
    mass = base.residual_mass(residual, q, score)
    lost = ~accepted & (p[token] > 0)  # A draft that p cannot draw carries no information.
    left = jnp.where(mass > 0, mass / jnp.maximum(mass + (1 - score), jnp.finfo(p.dtype).tiny), 0)
    return state._replace(
        accepted=accepted,
        score=state.score.at[above].set(jnp.where(lost, jnp.minimum(left, 1), score)),
        q=state.q.at[above].set(jnp.where(lost, normalised(or_else(residual, q)), q)),
        p=state.p.at[above].set(jnp.where(lost, normalised(p.at[token].set(0)), p)),
    )


def _visits(tree: Tree) -> tuple[Int[np.ndarray, " visits"], Bool[np.ndarray, " visits"]]:
    """Returns the node of each visit, depth first, and whether it is the first visit of that node.

    A node is visited before its children, to get its score, and after them, to be decided.
    """
    visits, stack = [], [(0, True)]
    while stack:
        node, first = stack.pop()
        visits.append((node, first))
        if first:
            stack.append((node, False))
            stack += [(int(child), True) for child in tree.children_table[node][::-1] if child >= 0]
    nodes, begins = zip(*visits, strict=True)
    return np.array(nodes, np.int32), np.array(begins)
