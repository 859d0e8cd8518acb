"""Token-by-token verification: SpecTr's Algorithm 3, and ERSD's Algorithms 4 and 5.

At each node a plan chooses a token, and the walk continues at a draft with that token, if there is
one. The k drafts at a node are the children of all nodes that spell the same tokens. A leaf has no
drafts, and the token after it is drawn from q: that is the bonus token.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.verifiers import base
from spectr_jax.decoding.verifiers.base import Selection, Verifier
from spectr_jax.transport import naive, rules
from spectr_jax.transport.base import Plan, normalised
from spectr_jax.transport.types import BoolScalar, IntScalar
from spectr_jax.utils.errors import UserError


class _Walk(NamedTuple):
    node: IntScalar  # The node of the last accepted draft.
    token: IntScalar  # The last choice, which no draft has once the walk has ended.
    alive: BoolScalar  # Whether the walk continues at a node that has children.
    bonus: BoolScalar  # Whether it has ended at a leaf.


@dataclasses.dataclass(frozen=True)
class TokenByToken(Verifier):
    """Verifies with one choice of a plan per node, from the root down.

    Attributes:
      plan: any transport plan; its drafting rule is the verifier's.
    """

    plan: Plan

    def __post_init__(self) -> None:
        if not isinstance(self.plan, Plan):
            raise UserError(
                f"plan={self.plan!r:.60}: must be a Plan, such as transport.get('kseq')"
            )

    @property
    def rule(self) -> rules.Rule | None:
        return self.plan.rule

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        """See `Verifier`. Consumes `key`: the choice at depth d uses `fold_in(key, length + d)`."""
        tree = scored.tree
        depth, is_inner = jnp.asarray(tree.depth), jnp.asarray(tree.is_inner)
        below = base.candidates(scored, self.rule)

        def key_at(node: IntScalar) -> Key[Array, ""]:
            return jax.random.fold_in(key, scored.length + depth[node])

        def choose(node: IntScalar) -> _Walk:
            drafts = below(node)
            # Scaled again: otherwise XLA for CPUs fuses p and q into each of their readers, and a
            # call of a small model takes 40 % longer.
            p, q = map(normalised, scored.p_and_q(node, drafts.first()))
            token = self.plan.choose(key_at(node), p, q, drafts.tokens, drafts.valid)
            token = jnp.where(jnp.any(q > 0), token, -1)
            carrier, accepted = drafts.carrying(tree, token)
            return _Walk(
                node=jnp.where(accepted, carrier, node),
                token=token,
                alive=accepted & is_inner[carrier],
                bonus=accepted & ~is_inner[carrier],
            )

        chosen_at, drafted = base.at_nodes(scored, choose), jnp.full((), tree.size > 0)
        start = _Walk(node=jnp.int32(0), token=jnp.int32(0), alive=drafted, bonus=~drafted)
        end = base.repeat(
            scored, tree.height, lambda walk: walk.alive, lambda walk: chosen_at(walk.node), start
        )

        # As words: JAX's check of key reuse refuses keys in a conditional under vmap.
        words, kind = jax.random.key_data(key_at(end.node)), jax.random.key_impl(key)

        def bonus() -> IntScalar:
            q = normalised(scored.q(end.node))
            return self.plan.bonus(jax.random.wrap_key_data(words, impl=kind), q)

        token = base.if_wanted(scored, end.bonus, bonus, end.token)
        return base.ending_at(scored, end.node, token, base.counts(scored, below))


@dataclasses.dataclass(frozen=True)
class FromTarget(TokenByToken):
    """Verifies distinct drafts that are functions of the sequence so far, such as `Recall`'s.

    It draws each token from the target, and continues at the draft that equals it. The acceptance
    is the probability of the drafts under q; no exact verifier has a higher one.
    """

    plan: Plan = dataclasses.field(default_factory=naive.Naive, init=False)

    @property
    def rule(self) -> None:
        return None
