r"""Phase 3 of a call (select): from the leaves to the root (traversal verification, Weng et al., 2025, arXiv 2505.12398).

Nodes are visited depth first, each after its children, in the order in which siblings were drawn without replacement. A node
u has a score r_u, a distribution q_u of what follows it and the draft distribution p_u of its next child; at first q_u is
the target's and p_u the draft's, and the root has score 1. A child of token x begins with

$$r = \min\left(1, \frac{r_u \ q_u(x)}{p_u(x)}\right).$$

Once all below it is rejected, a node is accepted with probability r: the path to it is emitted, and a token drawn from its
q. Otherwise its parent u loses it, and the next sibling begins from

$$q_u' = N (r_u q_u - p_u)_+, \qquad r_u' = \frac{\sum (r_u q_u - p_u)_+}{\sum (r_u q_u - p_u)_+ + 1 - r_u}, \qquad
p_u' = N (p_u \text{ without } x),$$

where N normalises. The root is accepted when nothing else is. On a chain this is block verification.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.selection import Selection, draft_law, ending_at, last_token
from spectr_jax.decoding.tree import Tree
from spectr_jax.transport.base import Plan, or_else


class _State(NamedTuple):
    """The visit under way. Rows are the depths 0..height of the path to it.

    Attributes:
      visit: [] the index of the next one.
      accepted: [] bool, whether the last node was.
      score: [height + 1] r.
      q: [height + 1, V]
      p: [height + 1, V]
    """

    visit: jax.Array
    accepted: jax.Array
    score: jax.Array
    q: jax.Array
    p: jax.Array


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
    """As `selection.select`, for drafts without replacement; the plan itself is not used. Consumes `key`."""
    del plan
    nodes, begins = (jnp.asarray(each) for each in _visits(tree))
    depths = jnp.asarray(tree.depth)
    first_child = jnp.asarray(np.maximum(tree.children_table[:, 0], 0))
    accept_key, token_key = jax.random.split(jax.random.fold_in(key, length))
    uniforms = jax.random.uniform(accept_key, (tree.size + 1,)).at[0].set(-1)  # The root is always accepted.

    def begin(state: _State, node) -> _State:
        depth, above = depths[node], depths[node] - 1
        chance, own = state.p[above, tokens[node]], state.score[above] * state.q[above, tokens[node]]
        score = jnp.where((chance > 0) & (node > 0), jnp.minimum(own / jnp.where(chance > 0, chance, 1), 1), node == 0)
        q = probabilities(logits[node], policy)
        own_p = draft_law(tree, p, first_child[node], q)
        return state._replace(
            score=state.score.at[depth].set(score), q=state.q.at[depth].set(q), p=state.p.at[depth].set(own_p)
        )

    def end(state: _State, node) -> _State:
        depth, above = depths[node], depths[node] - 1
        accepted = uniforms[node] < state.score[depth]
        law, score, token = state.p[above], state.score[above], tokens[node]
        residual = jnp.maximum(score * state.q[above] - law, 0)
        mass, rest = jnp.sum(residual), law.at[token].set(0)
        lost = ~accepted & (law[token] > 0)  # A draft that could not be drawn tells nothing.
        left = jnp.where(mass > 0, mass / jnp.maximum(mass + (1 - score), jnp.finfo(law.dtype).tiny), 0)
        return state._replace(
            accepted=accepted,
            score=state.score.at[above].set(jnp.where(lost, jnp.minimum(left, 1), score)),
            q=state.q.at[above].set(jnp.where(lost, _normal(or_else(residual, state.q[above])), state.q[above])),
            p=state.p.at[above].set(jnp.where(lost, _normal(rest), law)),
        )

    def step(state: _State) -> _State:
        state = jax.lax.cond(begins[state.visit], begin, end, state, nodes[state.visit])
        return state._replace(visit=state.visit + 1)

    rows = jnp.zeros((tree.height + 1, logits.shape[-1]), p.dtype)
    start = _State(jnp.int32(0), jnp.zeros((), bool), rows[:, 0], rows, rows)
    last = jax.lax.while_loop(lambda state: ~state.accepted, step, start)
    node = nodes[last.visit - 1]
    children = jnp.asarray(np.sum(tree.children_table >= 0, axis=1, dtype=np.int32))
    return ending_at(tree, tokens, node, last_token(token_key, last.q[depths[node]]), children)


def _normal(weights: jax.Array) -> jax.Array:
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1)


def _visits(tree: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Nodes [2 N + 2] in the order of the visits, depth first, and whether a visit begins with the node or ends with it."""
    nodes, begins, stack = [], [], [(0, True)]
    while stack:
        node, first = stack.pop()
        nodes.append(node)
        begins.append(first)
        if first:
            stack.append((node, False))
            stack += [(int(child), True) for child in tree.children_table[node][::-1] if child >= 0]
    return np.array(nodes, np.int32), np.array(begins)
