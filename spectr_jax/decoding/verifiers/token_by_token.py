"""Token-by-token verification: SpecTr's Algorithm 3, and ERSD's Algorithms 4 and 5.

At each node a plan chooses a token, and the walk continues at a draft with that token, if there is
one. The k drafts at a node are the children of all nodes that spell the same tokens. A leaf has no
drafts, and a plan without drafts draws from q: that is the bonus token.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.verifiers.base import Selection, Verifier, at_nodes, candidates, repeat
from spectr_jax.transport.base import Plan
from spectr_jax.transport.types import BoolScalar, IntScalar


class _Chosen(NamedTuple):
    token: IntScalar
    next: IntScalar  # The node where the walk continues.
    accepted: BoolScalar  # Whether there is such a node.
    drafts: IntScalar


class _Walk(NamedTuple):
    depth: IntScalar
    node: IntScalar
    alive: BoolScalar
    tokens: Int[Array, " steps"]
    path: Int[Array, " steps"]
    drafts: Int[Array, " steps"]


@dataclasses.dataclass(frozen=True)
class TokenByToken(Verifier):
    """Verifies with one choice of a plan per node, from the root down.

    Attributes:
      plan: any transport plan; its drafting rule is the verifier's.
    """

    plan: Plan

    @property
    def rule(self) -> str:
        return self.plan.drafts

    @property
    def statistic(self) -> str | None:  # type: ignore[override]
        statistics = {"iid": "carriers", "without_replacement": "children", "race": "children"}
        return statistics.get(self.rule)

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        """See `Verifier`. Consumes `key`: the choice at depth d uses `fold_in(key, length + d)`."""
        tree, depth = scored.tree, jnp.asarray(scored.tree.depth)
        below = candidates(scored, self.rule)

        def choose(node: IntScalar) -> _Chosen:
            drafts = below(node)
            p, q = scored.p_and_q(node, drafts.first())
            own_key = jax.random.fold_in(key, scored.length + depth[node])
            token = self.plan.select(own_key, p, q, drafts.tokens, drafts.valid).token
            next_node, accepted = drafts.carrying(tree, token)
            count = jnp.sum(drafts.valid)
            return _Chosen(token=token, next=next_node, accepted=accepted, drafts=count)

        chosen_at = at_nodes(scored, choose)

        def step(walk: _Walk) -> _Walk:
            chosen = chosen_at(walk.node)
            return _Walk(
                depth=walk.depth + 1,
                node=chosen.next,
                alive=chosen.accepted,
                tokens=walk.tokens.at[walk.depth].set(chosen.token),
                path=walk.path.at[walk.depth].set(chosen.next),
                drafts=walk.drafts.at[walk.depth].set(chosen.drafts),
            )

        zero, zeros = jnp.zeros((), jnp.int32), jnp.zeros(tree.height + 1, jnp.int32)
        start = _Walk(
            depth=zero, node=zero, alive=jnp.ones((), bool), tokens=zeros, path=zeros, drafts=zeros
        )
        end = repeat(scored, tree.height + 1, lambda walk: walk.alive, step, start)
        path = end.path[: tree.height]  # The last token is never a node.
        return Selection(tokens=end.tokens, emitted=end.depth, path=path, drafts=end.drafts)
