"""Drafts without a model: what followed the last tokens where they occurred before, in the prompt or in the output.

Known as prompt lookup decoding (Saxena, 2023; LLMA: Yang et al., 2023, arXiv 2304.04487). It pays where outputs repeat their
inputs: summaries, edits, retrieval, chats that quote.

Shape names: time T (committed tokens and the room after them), width W (inner nodes of a level), nodes N + 1.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.tree import Tree
from spectr_jax.transport.types import IntScalar
from spectr_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Fills a tree with what followed earlier occurrences of the last n tokens.

    Occurrences are ranked: those of longer n-grams first, later ones before earlier ones. The children of a node are the
    first distinct tokens that follow, in that order, where the tokens so far are the path to the node. A chain is thus what
    followed the latest occurrence of the longest n-gram; K chains begin with K different tokens; in a prefix tree the
    occurrences share their common prefixes.

    A copy that reaches the end of the sequence continues with its own beginning, so that a repeated phrase is drafted as
    often as the tree is deep. A node has the token -1, and thus no draft, if no occurrence is left for it.

    Attributes:
      max_ngram: the largest n, at least 1.
      min_ngram: the smallest n, from 1 to `max_ngram`.

    Raises:
      UserError: a number out of range.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        trees.checked(max_ngram=self.max_ngram, min_ngram=self.min_ngram)
        if self.min_ngram > self.max_ngram:
            raise UserError(
                f"min_ngram={self.min_ngram}: must be at most max_ngram={self.max_ngram}; lower it, or raise max_ngram"
            )

    def __call__(
        self, tree: Tree, tokens: Int[Array, " time"], length: IntScalar
    ) -> Int[Array, " nodes"]:
        """Returns the tokens of the drafted nodes 1..N, -1 where there is none, for one sequence.

        Args:
          tree: static.
          tokens: [T] int32; those from `length` on are ignored.
          length: [] int32, the number of committed tokens, at least 1.
        """
        rank = self._ranks(tokens, length)
        starts = jnp.arange(len(tokens))
        agree, by_level = rank[None] > 0, []
        for depth, nodes in enumerate(tree.levels[1:]):
            # Beyond the end the copy continues with what it has copied.
            following = tokens[starts + depth % jnp.maximum(length - starts, 1)]
            places, ranks = tree.parent[nodes] - tree.levels[depth][0], tree.sibling_rank[nodes]
            children = _children(rank, following, agree[np.unique(places)], int(ranks.max()) + 1)
            rows = np.searchsorted(np.unique(places), places)
            by_level.append(children.tokens[ranks, rows])
            agree = children.agree[ranks, rows]
        return jnp.concatenate(by_level).astype(jnp.int32)

    def _ranks(self, tokens: Int[Array, " time"], length: IntScalar) -> Int[Array, " time"]:
        """Returns by the place after an n-gram how it ranks among the occurrences, higher ones first; 0 where the last
        tokens did not occur. Ranks differ."""
        T = len(tokens)
        place = jnp.arange(T)
        agree, matched = (place > 0) & (place < length), jnp.zeros(T, jnp.int32)
        for back in range(1, self.max_ngram + 1):
            last = tokens[jnp.maximum(length - back, 0)]
            before = jnp.pad(tokens, (back, 0))[:T]
            agree &= (before == last) & (place >= back)
            matched += agree
        return jnp.where(matched >= self.min_ngram, matched * T + place, 0)


class _Children(NamedTuple):
    """The children of W nodes, by their rank among siblings.

    Attributes:
      tokens: [C, W] -1 where no occurrence is left.
      agree: [C, W, T] the occurrences that agree with the path to the child.
    """

    tokens: Int[Array, "children width"]
    agree: Bool[Array, "children width time"]


def _children(
    rank: Int[Array, " time"],
    following: Int[Array, " time"],
    agree: Bool[Array, "width time"],
    count: int,
) -> _Children:
    """Returns the first `count` distinct tokens in `following` of the occurrences that agree with each node, by rank."""
    tokens, agreeing = [], []
    for _ in range(count):
        best = jnp.max(jnp.where(agree, rank, 0), axis=1)
        token = jnp.where(best > 0, following[best % len(rank)], -1)
        carried = agree & (following == token[:, None])
        tokens.append(token)
        agreeing.append(carried)
        agree &= ~carried
    return _Children(jnp.stack(tokens), jnp.stack(agreeing))
