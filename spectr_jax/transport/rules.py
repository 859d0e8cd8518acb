"""Drafting rules: how the k drafts for one token are drawn from p."""

import abc
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spectr_jax.transport.draws import arrivals, draw
from spectr_jax.transport.types import ExactProbs, Key, Probs, Scalar
from spectr_jax.utils.errors import UserError

LevelProbs: TypeAlias = Float[Array, "width vocab"]
Counts: TypeAlias = Int[np.ndarray, " width"]
LevelTokens: TypeAlias = Int[Array, "width children"]
DraftSequences: TypeAlias = Iterator[tuple[tuple[int, ...], float]]


@dataclasses.dataclass(frozen=True)
class Rule(abc.ABC):
    """How drafts are drawn from p. A rule is a frozen dataclass; equal rules must hash alike.

    Attributes:
      distinct: whether the drafts for one token are distinct.
      shares_key: whether the target's token is drawn with the key that drew the drafts.
    """

    distinct: ClassVar[bool] = True
    shares_key: ClassVar[bool] = False

    @abc.abstractmethod
    def draw(self, key: Key, p: LevelProbs, counts: Counts) -> LevelTokens:
        """Returns drafts [W, C] int32 of the W nodes of one level; consumes `key`.

        Node w gets `counts[w]` drafts from p[w]. C is the largest count, and a node's entries past
        its count are unused.
        """

    @abc.abstractmethod
    def sequences(self, p: ExactProbs, k: int) -> DraftSequences:
        """Yields each sequence of k drafts that can be drawn from p [V], with its probability.

        Distinct drafts are fewer than k if fewer than k tokens have p > 0.
        """

    def check(self, p: ExactProbs, drafts: tuple[int, ...]) -> None:
        """Raises `UserError` if `drafts`, all with p > 0, cannot come from p [V] by this rule."""
        if self.distinct and len(set(drafts)) < len(drafts):
            raise UserError(
                f"drafts={drafts}: a token is repeated; give distinct drafts to this plan"
            )


class IndependentDrafts(Rule):
    """Independent draws from p. Tokens may repeat."""

    distinct = False

    def draw(self, key: Key, p: LevelProbs, counts: Counts) -> LevelTokens:
        keys, shape = jax.random.split(key, len(p)), (int(counts.max()),)
        return jax.vmap(lambda key, probs: draw(key, probs, shape))(keys, p)

    def sequences(self, p: ExactProbs, k: int) -> DraftSequences:
        for drafts in itertools.product(np.flatnonzero(p).tolist(), repeat=k):
            yield drafts, float(np.prod(p[list(drafts)]))


class WithoutReplacement(Rule):
    """Draws without replacement (Gumbel top-k): each is drawn from p without those before it.

    This is the Plackett-Luce distribution. Once the support of p is exhausted, distinct tokens with
    p = 0 follow.
    """

    def draw(self, key: Key, p: LevelProbs, counts: Counts) -> LevelTokens:
        keys, most = jax.random.split(key, len(p)), int(counts.max())
        return jax.vmap(lambda key, probs: arrivals(key, probs, most))(keys, p)

    def sequences(self, p: ExactProbs, k: int) -> DraftSequences:
        support = np.flatnonzero(p).tolist()
        for drafts in itertools.permutations(support, min(k, len(support))):
            yield drafts, probability_in_order(p, drafts)


class RaceRule(WithoutReplacement):
    """Draws without replacement by one race for all nodes, which the plan `race` runs, too."""

    shares_key = True

    def draw(self, key: Key, p: LevelProbs, counts: Counts) -> LevelTokens:
        return jax.vmap(lambda probs: arrivals(key, probs, int(counts.max())))(p)


class GreedyRule(Rule):
    """The k - 1 likeliest tokens and, as the last draft, a draw from the others (Hu et al., 2025).

    If the others have p = 0, the last draft is the next token, also with p = 0.
    """

    def draw(self, key: Key, p: LevelProbs, counts: Counts) -> LevelTokens:
        most = int(counts.max())

        def likeliest_and_one(key: Key, probs: Probs, count: Scalar) -> Int[Array, " children"]:
            order = jax.lax.top_k(probs, most)[1]
            is_likeliest = jnp.arange(most) < count - 1
            rest = probs.at[jnp.where(is_likeliest, order, len(probs))].set(0, mode="drop")
            one = jnp.where(jnp.any(rest > 0), draw(key, rest), order[count - 1])
            return jnp.where(is_likeliest, order, one).astype(jnp.int32)

        keys = jax.random.split(key, len(p))
        return jax.vmap(likeliest_and_one)(keys, p, jnp.asarray(counts))

    def sequences(self, p: ExactProbs, k: int) -> DraftSequences:
        last_rank = min(k, int(np.sum(p > 0))) - 1
        likeliest = np.argsort(-p, kind="stable")[:last_rank].tolist()
        rest = p.copy()
        rest[likeliest] = 0
        for last in np.flatnonzero(rest).tolist():
            yield (*likeliest, last), float(rest[last] / rest.sum())

    def check(self, p: ExactProbs, drafts: tuple[int, ...]) -> None:
        super().check(p, drafts)
        likeliest = list(drafts[:-1])
        if likeliest and min(p[likeliest]) < max(np.delete(p, likeliest), default=0):
            raise UserError(
                f"drafts={drafts}: all but the last must be the likeliest; draft greedily"
            )


IID, WITHOUT_REPLACEMENT = IndependentDrafts(), WithoutReplacement()
RACE, GREEDY = RaceRule(), GreedyRule()


def probability_in_order(p: ExactProbs, drafts: Sequence[int]) -> float:
    """Returns the probability of drawing `drafts` from p [V] without replacement, in this order."""
    rest, probability = p.copy(), 1.0
    for draft in drafts:
        probability *= p[draft] / rest.sum()  # A running difference from 1 would lose small terms.
        rest[draft] = 0
    return float(probability)
