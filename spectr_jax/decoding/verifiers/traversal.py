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

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers.base import (
    Selection,
    Verifier,
    ending_at,
    last_token,
    repeat,
    residual_mass,
)
from spectr_jax.transport.base import or_else
from spectr_jax.transport.types import BoolScalar, IntScalar, Probs


class _State(NamedTuple):
    """The visit under way. Rows are the depths 0..height of the path to it.

    Attributes:
      visit: [] the index of the next one.
      accepted: [] bool, whether the last node was.
      score: [height + 1] r.
      q: [height + 1, V]
      p: [height + 1, V]
    """

    visit: IntScalar
    accepted: BoolScalar
    score: Float[Array, " steps"]
    q: Float[Array, "steps vocab"]
    p: Float[Array, "steps vocab"]


@dataclasses.dataclass(frozen=True)
class Traversal(Verifier):
    """Verifies from the leaves to the root, for drafts without replacement."""

    rule = "without_replacement"

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        """See `Verifier`. Consumes `key`."""
        tree, depths = scored.tree, jnp.asarray(scored.tree.depth)
        nodes, begins = (jnp.asarray(each) for each in _visits(tree))
        accept_key, token_key = jax.random.split(jax.random.fold_in(key, scored.length))
        uniforms = (
            jax.random.uniform(accept_key, (tree.size + 1,)).at[0].set(-1)
        )  # The root is always accepted.

        def step(state: _State) -> _State:
            node, begin = nodes[state.visit], begins[state.visit]
            state = jax.lax.cond(begin, _begun, _ended, scored, uniforms, state, node)
            return state._replace(visit=state.visit + 1)

        rows = jnp.zeros((tree.height + 1, scored.vocab_size), scored.p.dtype)
        start = _State(
            visit=jnp.int32(0), accepted=jnp.zeros((), bool), score=rows[:, 0], q=rows, p=rows
        )
        last = repeat(scored, len(nodes), lambda state: ~state.accepted, step, start)
        node = nodes[last.visit - 1]
        children = jnp.asarray(np.sum(tree.children_table >= 0, axis=1, dtype=np.int32))
        return ending_at(scored, node, last_token(token_key, last.q[depths[node]]), children)


def _begun(
    scored: ScoredTree, uniforms: Float[Array, " nodes"], state: _State, node: IntScalar
) -> _State:
    """Begins the visit of `node`: it gets its score, by the present state of its parent, and its distributions."""
    del uniforms
    depth, token = jnp.asarray(scored.tree.depth)[node], scored.tokens[node]
    above = jnp.maximum(depth - 1, 0)
    chance, own = state.p[above, token], state.score[above] * state.q[above, token]
    score = jnp.where(
        (chance > 0) & (node > 0), jnp.minimum(own / jnp.where(chance > 0, chance, 1), 1), node == 0
    )
    first_child = jnp.asarray(np.maximum(scored.tree.children_table[:, 0], 0))[node]
    p, q = scored.p_and_q(node, first_child)
    return state._replace(
        score=state.score.at[depth].set(score),
        q=state.q.at[depth].set(q),
        p=state.p.at[depth].set(p),
    )


def _ended(
    scored: ScoredTree, uniforms: Float[Array, " nodes"], state: _State, node: IntScalar
) -> _State:
    """Ends the visit of `node`: it is accepted, or its parent loses it. The root is accepted."""
    depth, token = jnp.asarray(scored.tree.depth)[node], scored.tokens[node]
    above = jnp.maximum(depth - 1, 0)
    accepted = uniforms[node] < state.score[depth]
    p, q, score = state.p[above], state.q[above], state.score[above]
    residual = jnp.maximum(score * q - p, 0)
    mass = residual_mass(residual, q, score)
    lost = ~accepted & (p[token] > 0)  # A draft that could not be drawn tells nothing.
    left = jnp.where(mass > 0, mass / jnp.maximum(mass + (1 - score), jnp.finfo(p.dtype).tiny), 0)
    return state._replace(
        accepted=accepted,
        score=state.score.at[above].set(jnp.where(lost, jnp.minimum(left, 1), score)),
        q=state.q.at[above].set(jnp.where(lost, _normal(or_else(residual, q)), q)),
        p=state.p.at[above].set(jnp.where(lost, _normal(p.at[token].set(0)), p)),
    )


def _normal(weights: Probs) -> Probs:
    """Returns the weights scaled to sum to 1, or zeros as they are."""
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1)


def _visits(tree: Tree) -> tuple[Int[np.ndarray, " visits"], Bool[np.ndarray, " visits"]]:
    """Returns the nodes in the order of the visits, depth first, and whether each begins with the node or ends with it."""
    nodes, begins, stack = [], [], [(0, True)]
    while stack:
        node, first = stack.pop()
        nodes.append(node)
        begins.append(first)
        if first:
            stack.append((node, False))
            stack += [(int(child), True) for child in tree.children_table[node][::-1] if child >= 0]
    return np.array(nodes, np.int32), np.array(begins)
