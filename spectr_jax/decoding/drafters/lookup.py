"""Prompt lookup: drafts without a model, copied from earlier occurrences of the last tokens.

It pays off when outputs repeat their inputs: summaries, edits, retrieval, quotes in chats.

Sources: Saxena, 2023; LLMA (Yang et al., 2023, arXiv 2304.04487).

Shape names: time T (committed tokens, then unused room), width W (inner nodes of a level), nodes
N + 1.
"""

import dataclasses
import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.drafters.base import Drafter, Drafts, Sequences, Setup, without_p
from spectr_jax.decoding.tree import Keys, Tree
from spectr_jax.models.cache import Cache
from spectr_jax.transport.types import IntScalar
from spectr_jax.utils.errors import UserError

Places: TypeAlias = Int[Array, " time"]

UNROLLED = 8
"""The largest number of steps of a loop that is compiled as straight code."""


@dataclasses.dataclass(frozen=True)
class Lookup(Drafter):
    """Fills a tree with the tokens that followed earlier occurrences of the last n tokens.

    Longer n-grams rank first; among equals, later occurrences do. The children of a node are the
    first distinct tokens, in that order, that follow its path in an occurrence. A chain therefore
    copies what followed the best occurrence, and K chains begin with K different tokens.

    A copy that reaches the end of the sequence continues from its own start, so that a repeated
    phrase fills the whole depth of the tree. A node without an occurrence has the token -1, which
    means no draft.

    Attributes:
      max_ngram: the largest n, at least 1.
      min_ngram: the smallest n, from 1 to `max_ngram`.

    Raises:
      UserError: a number is out of range.
    """

    max_ngram: int = 3
    min_ngram: int = 1

    def __post_init__(self) -> None:
        trees.check_positive(max_ngram=self.max_ngram, min_ngram=self.min_ngram)
        if self.min_ngram > self.max_ngram:
            limit = f"must be at most max_ngram={self.max_ngram}"
            raise UserError(f"min_ngram={self.min_ngram}: {limit}")

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: Any, target_cache: Cache
    ) -> Drafts:
        drafted = jax.vmap(functools.partial(self.copied, setup.tree))(*sequences)
        tokens = jnp.concatenate([sequences.last(), drafted], axis=1)
        return without_p(setup, tokens, state, target_cache)

    def copied(self, tree: Tree, tokens: Places, length: IntScalar) -> Int[Array, " nodes"]:
        """Returns the tokens of the drafted nodes 1..N of one sequence; -1 means no draft.

        Args:
          tree: static.
          tokens: [T] int32; entries at `length` and later are ignored.
          length: [] int32, the number of committed tokens, at least 1.
        """
        tokens = jnp.asarray(tokens)
        rank = self._ranks(tokens, length)
        starts = jnp.arange(len(tokens))
        agree, by_level = rank[None] > 0, []
        for depth, nodes in enumerate(tree.levels[1:]):
            # Past the end, a copy continues from its own start.
            following = tokens[starts + depth % jnp.maximum(length - starts, 1)]
            ranks = tree.sibling_rank[nodes]
            inner, rows = np.unique(tree.parent[nodes], return_inverse=True)
            agree_inner = agree[inner - tree.levels[depth][0]]
            children, agreeing = _children(rank, following, agree_inner, int(ranks.max()) + 1)
            by_level.append(children[ranks, rows])
            agree = agreeing[ranks, rows]
        return jnp.concatenate(by_level).astype(jnp.int32)

    def _ranks(self, tokens: Places, length: IntScalar) -> Places:
        """Returns the rank [T] of each place, by how many tokens before it match the last tokens.

        A higher rank is better, and later places win ties; 0 means that too few tokens match.
        """
        T = len(tokens)
        place = jnp.arange(T)

        def compare(back: IntScalar, state: tuple[Any, Any, Places]) -> tuple[Any, Any, Places]:
            agree, matched, before = state
            before = jnp.pad(before, (1, 0))[:T]  # The token `back` places before each.
            last = tokens[jnp.maximum(length - back, 0)]
            agree &= (before == last) & (place >= back)
            return agree, matched + agree, before

        start = (place > 0) & (place < length), jnp.zeros(T, jnp.int32), tokens
        steps = min(self.max_ngram, T)
        # A small loop is unrolled, which is faster on a CPU.
        _, matched, _ = jax.lax.fori_loop(1, steps + 1, compare, start, unroll=min(steps, UNROLLED))
        return jnp.where(matched >= self.min_ngram, matched * T + place, 0)


def _children(
    rank: Places, following: Places, agree: Bool[Array, "width time"], count: int
) -> tuple[Int[Array, "children width"], Bool[Array, "children width time"]]:
    """Returns the best `count` distinct tokens of `following` for each row of `agree`.

    A token is -1 where no occurrence is left. Also returns the occurrences that go with each token.
    """
    tokens, agreeing = [], []
    for _ in range(count):
        best = jnp.max(jnp.where(agree, rank, 0), axis=1)
        token = jnp.where(best > 0, following[best % len(rank)], -1)
        carried = agree & (following == token[:, None])
        tokens.append(token)
        agreeing.append(carried)
        agree &= ~carried
    return jnp.stack(tokens), jnp.stack(agreeing)
