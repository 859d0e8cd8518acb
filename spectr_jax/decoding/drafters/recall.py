"""Drafts without a model: what followed earlier occurrences, and what the target ranked first.

Prompt lookup (Saxena, 2023; LLMA: Yang et al., 2023, arXiv 2304.04487) copies the tokens that
followed an earlier occurrence of the last tokens; the longest match comes first, as in SAM decoding
(Hu et al., 2024, arXiv 2411.10666). Token Recycling (Luo et al., 2024, arXiv 2408.08696) drafts
after each token what the target ranked first after the same token, the last time a call scored it.
One drafter does both, and either alone.

Shape suffixes: T places of a sequence, W nodes of a level, C children, V vocabulary, R ranks.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spectr_jax.decoding.drafters.base import (
    Drafter,
    Drafts,
    Features,
    Sequences,
    Setup,
    Verified,
    without_p,
)
from spectr_jax.decoding.tree import Keys, NodeTokens, Tree
from spectr_jax.models.bigram import Bigram
from spectr_jax.models.cache import Cache
from spectr_jax.models.frozen import Frozen
from spectr_jax.transport.types import IntScalar
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError

Row: TypeAlias = Int[Array, " time"]
Table: TypeAlias = Int[Array, "vocab ranks"]

MOST_NGRAM, MOST_RANKS = 64, 64
"""The largest `max_ngram` and `ranks`."""

MATCHED = (-3.2, -1.4, -0.3, 0.2, 0.4, 0.6, 0.6, 1.1, 1.1, 1.1, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6, 1.9)
LATER = -1.5
RANKED = (0.8, 0.4, -0.1, -0.3, -0.7, -0.9, -1.1, -1.1)
UNRANKED = -0.2
"""The log-odds of acceptance, fitted by `scripts/dev/fit_recall.py`, are
`MATCHED[tokens that match] + RANKED[rank]`.

`LATER` is added if the token did not follow the best match; `UNRANKED` is for tokens that the table
does not have.
"""

UNROLLED = 16
"""The largest number of steps of the search for matches that are compiled as straight code."""

BLOCK = 128
"""The size of the blocks in which `likeliest` searches on a CPU."""


class _Level(NamedTuple):
    """The state after the nodes of a level; its last token is at `length + depth - 1`."""

    tokens: Int[Array, "width time"]  # The sequence, then the tokens of the node's path.
    matches: Int[Array, "width time"]  # By place: how many tokens before it equal the last tokens.


@dataclasses.dataclass(frozen=True)
class Recall(Drafter):
    """Drafts what followed the longest matches, then what the target ranked first.

    The candidates for the children of a node are the first distinct tokens that followed earlier
    occurrences of its last tokens, where longer matches come first and among equals later ones; and
    the tokens that the target ranked first after the node's token, the last time a call scored it.
    The children are the best candidates by fitted acceptance rates. A token of -1 means no draft.

    A match may run into the path itself, so that a repeated phrase fills the whole tree.

    The state is a table [V, R] of each sequence, int32, which each call updates at all tokens that
    the target scored, accepted or not. It starts from a `Bigram` of the target, if there is one:
    `generate` takes it as the draft model.

    Attributes:
      max_ngram: the longest match that is told apart from longer ones; 0 to copy nothing.
      min_ngram: the shortest match, from 1 to `max_ngram`.
      ranks: R, the number of tokens that are recalled after each token; 0 for none.

    Raises:
      UserError: a number is out of range.
    """

    max_ngram: int = 16
    min_ngram: int = 1
    ranks: int = 8

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_ngram", 0, MOST_NGRAM),
            ("min_ngram", 1, max(self.max_ngram, 1)),
            ("ranks", 0, MOST_RANKS),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise UserError(f"{name}={value!r}: must be an integer in {least}..{most}")
        if not self.max_ngram and not self.ranks:
            raise UserError("max_ngram=0, ranks=0: nothing is drafted; raise one of them")

    @property
    def takes_model(self) -> bool:
        return self.ranks > 0

    def check(self, target: Frozen, draft: Frozen | None) -> None:
        if draft is not None:
            _checked_table(draft.merge())

    def init(
        self, setup: Setup, prompts: Sequences, capacity: int, features_BxTxF: Features
    ) -> Int[Array, "batch vocab ranks"] | None:
        if not self.ranks:
            return None
        B, V = len(prompts.lengths), setup.target.vocab_size
        table = jnp.full((V, self.ranks), -1, jnp.int32)
        if setup.draft is not None:
            known = _checked_table(setup.draft).tokens[...][:, : self.ranks].astype(jnp.int32)
            table = table.at[:, : known.shape[1]].set(known)
        return jnp.broadcast_to(table, (B, V, self.ranks))

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: Any, target_cache: Cache
    ) -> Drafts:
        drafted = jax.vmap(functools.partial(self.recalled, setup.tree))(*sequences, state)
        tokens = jnp.concatenate([sequences.last(), drafted], axis=1)
        return without_p(setup, tokens, state, target_cache)

    def commit(self, setup: Setup, state: Any, verified: Verified) -> Any:
        """Stores the likeliest tokens after each scored token.

        Of several nodes with one token, the last accepted one counts, or else the last.
        """
        if state is None:
            return None
        top = likeliest(verified.logits, self.ranks)

        def stored(table: Table, tokens: NodeTokens, path: Array, new: Any, top: Array) -> Table:
            nodes = jnp.arange(len(tokens))
            accepted = jnp.any((nodes == path[:, None]) & (jnp.arange(len(path)) < new)[:, None], 0)
            priority = nodes + len(tokens) * (accepted | (nodes == 0))
            outdone = (tokens == tokens[:, None]) & (priority > priority[:, None])
            places = jnp.where((tokens < 0) | jnp.any(outdone, axis=1), len(table), tokens)
            return table.at[places].set(top, mode="drop")

        accepted_B = verified.after.lengths - verified.lengths_before - 1
        return jax.vmap(stored)(state, verified.drafted, verified.path, accepted_B, top)

    def recalled(
        self, tree: Tree, tokens: Row, length: IntScalar, table: Table | None = None
    ) -> Int[Array, " nodes"]:
        """Returns the tokens of the drafted nodes 1..N of one sequence; -1 means no draft.

        Args:
          tree: static.
          tokens: [T] int32, with room for the tree; entries at `length` and later are ignored.
          length: [] int32, the number of committed tokens, at least 1.
          table: [V, R] int32, with -1 for unknown; None without ranks.
        """
        tokens = jnp.asarray(tokens)
        inner, drafted = np.zeros(1, int), []  # The inner nodes of a level.
        level = _Level(tokens=tokens[None], matches=self._matches(tokens, length)[None])
        for depth, nodes in enumerate(tree.levels[1:]):
            ranks, rows = tree.sibling_rank[nodes], np.searchsorted(inner, tree.parent[nodes])
            count = int(ranks.max()) + 1
            best = functools.partial(self._candidates, length + depth, count, table)
            drafted.append(jax.vmap(best)(*level)[rows, ranks])
            inner = np.intersect1d(nodes, tree.inner)
            chosen = inner - nodes[0]
            level = jax.tree.map(lambda leaf, rows=rows[chosen]: leaf[rows], level)
            below = functools.partial(self._below, length + depth)
            level = jax.vmap(below)(level, drafted[-1][chosen])
        return jnp.concatenate(drafted)

    def _matches(self, tokens: Row, length: IntScalar) -> Row:
        """Returns how many tokens before each place [T] equal the last tokens, up to `max_ngram`."""
        place = jnp.arange(len(tokens))

        def compare(back: IntScalar, state: tuple[Array, Row, Row]) -> tuple[Array, Row, Row]:
            agree, matched, before = state
            before = _shifted(before)  # The token `back` places before each.
            agree &= (before == tokens[jnp.maximum(length - back, 0)]) & (place >= back)
            return agree, matched + agree, before

        start = place < length, jnp.zeros(len(tokens), jnp.int32), tokens
        # Unrolled, it is one kernel on an accelerator.
        unroll = min(max(self.max_ngram, 1), UNROLLED)
        return jax.lax.fori_loop(1, self.max_ngram + 1, compare, start, unroll=unroll)[1]

    def _below(self, end: IntScalar, level: _Level, token: IntScalar) -> _Level:
        """Returns the state of a node below one whose path ends at `end`; its token is `token`."""
        place, longer = jnp.arange(len(level.tokens)), _shifted(level.matches) + 1
        agree = (_shifted(level.tokens) == token) & (place > 0) & (place <= end)
        return _Level(
            tokens=level.tokens.at[end].set(token),
            matches=jnp.where(agree, jnp.minimum(longer, self.max_ngram), 0),
        )

    def _copies(
        self, count: int, tokens: Row, matches: Row
    ) -> tuple[Int[Array, " copies"], Float[Array, " copies"]]:
        """Returns what followed the best matches, distinct, with scores; -1 if there are no more."""
        T = len(tokens)
        # Longer matches rank first, and among equals later places do.
        priority = jnp.where(matches >= self.min_ngram, matches * T + jnp.arange(T), 0)
        copied, scores = [], []
        for number in range(count if self.max_ngram else 0):
            best = jnp.max(priority)
            copied.append(jnp.where(best > 0, tokens[best % T], -1))
            matched = jnp.float32(MATCHED)[jnp.minimum(best // T, len(MATCHED) - 1)]
            scores.append(matched + np.float32(LATER * (number > 0)))
            priority = jnp.where(tokens == copied[-1], 0, priority)
        return jnp.array(copied, jnp.int32), jnp.array(scores, jnp.float32)

    def _candidates(
        self, end: IntScalar, count: int, table: Table | None, tokens: Row, matches: Row
    ) -> Int[Array, " children"]:
        """Returns the best `count` candidates for the token at `end`; -1 if there are no more."""
        candidates, scores = self._copies(count, tokens, matches)
        if table is not None:
            last = tokens[end - 1]
            ranked = jnp.where(last < 0, -1, table[jnp.maximum(last, 0)])
            of_rank = jnp.float32([*RANKED, *RANKED[-1:] * MOST_RANKS][: self.ranks])
            same = (candidates[:, None] == ranked) & (ranked >= 0)
            scores += jnp.where(jnp.any(same, axis=1), same @ of_rank, np.float32(UNRANKED))
            # A copied token that is in the table too is one candidate.
            candidates = jnp.append(candidates, jnp.where(jnp.any(same, axis=0), -1, ranked))
            scores = jnp.append(scores, of_rank + np.float32(MATCHED[0]))
        order = jnp.argsort(jnp.where(candidates < 0, jnp.inf, -scores), stable=True)
        best = candidates[order][:count]
        return jnp.pad(best, (0, count - len(best)), constant_values=-1)


def _checked_table(draft: Any) -> Bigram:
    """Returns `draft`; raises `UserError` unless it is a table."""
    if not isinstance(draft, Bigram):
        kind = type(draft).__name__
        hint = "give the table that spectr_jax.tabulate makes of this target, or none"
        raise UserError(f"draft: must be a Bigram to start the table, not a {kind}; {hint}")
    return draft


def _shifted(row: Row) -> Row:
    """Returns the entry before each place, and 0 for the first."""
    return jnp.pad(row, (1, 0))[:-1]


def likeliest(logits: Float[Array, "*batch vocab"], count: int) -> Int[Array, "*batch ranks"]:
    """Returns the `count` tokens with the largest logits, largest first; -1 for logits of -inf.

    A CPU looks only into the blocks with the largest maxima: a seventh of the time of `top_k`.
    """
    V = logits.shape[-1]
    if backend.on_cpu() and count * BLOCK < V:
        padding = [*[(0, 0)] * (logits.ndim - 1), (0, -V % BLOCK)]
        blocks = jnp.pad(logits, padding, constant_values=-jnp.inf)
        blocks = blocks.reshape(*logits.shape[:-1], -1, BLOCK)
        chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), count)[1]
        within = jnp.take_along_axis(blocks, chosen[..., None], axis=-2)
        best, place = jax.lax.top_k(within.reshape(*logits.shape[:-1], -1), count)
        tokens = jnp.take_along_axis(chosen, place // BLOCK, axis=-1) * BLOCK + place % BLOCK
    else:
        best, tokens = jax.lax.top_k(logits, min(count, V))
        padding = [*[(0, 0)] * (logits.ndim - 1), (0, count - tokens.shape[-1])]
        best = jnp.pad(best, padding, constant_values=-jnp.inf)
        tokens = jnp.pad(tokens, padding)
    return jnp.where(best > -jnp.inf, tokens, -1)
