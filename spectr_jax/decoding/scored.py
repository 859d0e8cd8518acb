"""A drafted and scored tree: everything that a verifier sees of one call.

Shape names: nodes N + 1 (the root is node 0), inner I, vocab V.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from spectr_jax.decoding.policy import Shaping, shaped
from spectr_jax.decoding.tree import Tree
from spectr_jax.transport.types import IntScalar, Probs
from spectr_jax.utils import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredTree:
    """The drafts of one call, with both models' distributions at the nodes, for one sequence.

    For a batch, all arrays have a leading batch dimension.

    Attributes:
      tree: static, N drafted nodes.
      shaping: the temperature and limits that turn `logits` into q, on demand: a CPU visits few
        nodes.
      length: [] int32, the number of committed tokens before the call.
      tokens: [N + 1] int32 by node; the root's is the last committed token. -1 means no draft.
      p: [I, V] draft distributions at the inner nodes; [0, V] if the drafter does not draw: its
        drafts then have probability 1 each. In bfloat16 it sums to 1 only up to its rounding
        (`levels.stored`).
      logits: [N + 1, V] of the target at each node, after the policy's `process`.
      rows: static; the number of sequences that are verified together on a device.
    """

    tree: Tree = dataclasses.field(metadata={"static": True})
    shaping: Shaping
    length: Int[Array, "*batch"]
    tokens: Int[Array, "*batch nodes"]
    p: Float[Array, "*batch inner vocab"]
    logits: Float[Array, "*batch nodes vocab"]
    rows: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def vocab_size(self) -> int:
        """Returns V, the number of tokens in the vocabulary."""
        return self.logits.shape[-1]

    def q(self, node: IntScalar | int) -> Probs:
        """Returns the target distribution [V] of the token after `node`."""
        return shaped(self.logits[node], self.shaping)

    def p_of(self, rank: IntScalar | int) -> Probs:
        """Returns the draft distribution [V] of the children of the inner node of this rank."""
        p = self.p[rank]
        if p.dtype == self.logits.dtype:
            return p
        return p.astype(self.logits.dtype) / jnp.sum(p, dtype=self.logits.dtype)

    def p_and_q(self, node: IntScalar, child: IntScalar) -> tuple[Probs, Probs]:
        """Returns the draft distribution [V] that `child` was drawn from, and q [V] at `node`.

        The draft distribution is looked up by the child: of the nodes that spell the same tokens,
        some may be leaves, where the draft model did not run. It is undefined if `child` is the
        root, and equals q if the drafter does not draw.

        Both sum to 1, up to rounding, without negative or NaN entries. A model without a
        distribution (NaN logits) has 0 everywhere; the mass of such a q goes to the token -1.
        """
        q = self.q(node)
        p = self.p_of(self._rank_above(child)) if len(self.p) else q
        return jnp.where(p > 0, p, 0), jnp.where(q > 0, q, 0)

    def spelled_alike(self) -> Bool[Array, "nodes nodes"]:
        """Returns [N + 1, N + 1] bool: whether nodes i and j spell the same tokens."""
        spelled = self.tokens[jnp.asarray(self.tree.paths)]
        depth = jnp.asarray(self.tree.depth)
        return jnp.all(spelled[:, None] == spelled, axis=-1) & (depth[:, None] == depth)

    def draft_probability(self) -> Float[Array, " nodes"]:
        """Returns [N + 1], the draft probability of each node given its parent; 1 for the root.

        It is NaN where the draft has no distribution (NaN logits).
        """
        if not len(self.p):
            return (self.tokens >= 0).astype(self.logits.dtype)
        rows = self._rank_above(jnp.arange(1, self.tree.size + 1))
        of_tokens = sharding.whole(self.p[rows, self.tokens[1:]])
        return jnp.append(jnp.ones(1, of_tokens.dtype), of_tokens).astype(self.logits.dtype)

    def _rank_above(self, node: Int[Array, "*nodes"]) -> Int[Array, "*nodes"]:
        return jnp.asarray(self.tree.inner_rank)[jnp.asarray(self.tree.parent)[node]]
