"""Stop sequences: a continuation ends with the token that completes the first of several texts, or sequences of tokens.

A text is looked for in what the tokens spell, byte by byte, wherever tokens begin and end: an automaton (Aho and Corasick,
1975) has read the bytes of each token in advance, so that a token is one lookup on the device. A token may spell more after
the stop text; `before` removes the stop text and what follows it.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spectr_jax.utils.errors import UserError

START, MATCHED = 0, 1
"""States: nothing of a stop sequence was read, or all of one."""
BUCKET = 16
"""The number of states is a multiple, so that stop sequences of similar lengths share a program."""
MOST_STATES = 4096
"""Of all stop sequences together; a table has a row of the vocabulary for each."""

StopSpec: TypeAlias = "Stop | str | Sequence[str] | Sequence[Sequence[int]] | None"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stop:
    """Stop sequences as a `decode` of your own takes them; `prepared` makes it.

    Attributes:
      table: [states, V] int16, the state after each token.
    """

    table: Int[Array, "states vocab"]

    def follow(
        self, states_B: Int[Array, " batch"], tokens_BxS: Int[Array, "batch steps"]
    ) -> Int[Array, "batch steps"]:
        """Returns the state after each token of a call, from the states before it."""

        def step(states_B: Array, tokens_B: Array) -> tuple[Array, Array]:
            after_B = self.table[states_B, jnp.maximum(tokens_B, 0)].astype(jnp.int32)
            return after_B, after_B

        states_SxB: Array = jax.lax.scan(step, states_B, tokens_BxS.T, unroll=tokens_BxS.shape[1])[
            1
        ]
        return states_SxB.T

    def never(self) -> "Stop":
        """Returns one of the same shape that stops nothing."""
        return Stop(jnp.zeros_like(self.table))


def prepared(stop: StopSpec, tokenizer: Any, vocab_size: int) -> Stop | None:
    """Returns the automaton of stop sequences, or None if there are none.

    Args:
      stop: one text, several, or several sequences of tokens.
      tokenizer: of the model, for texts; None if it is not known.
      vocab_size: the model's.

    Raises:
      UserError: `stop` is something else, or the tokenizer does not say what its tokens spell.
    """
    if isinstance(stop, Stop) and stop.table.shape[1] != vocab_size:
        raise UserError(
            f"stop: is for {stop.table.shape[1]} tokens and the model has {vocab_size}; prepare it for this one"
        )
    if stop is None or isinstance(stop, Stop):
        return stop
    several: tuple[Any, ...] = (
        (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else ()
    )
    texts = all(isinstance(each, str) and each for each in several)
    if not texts:
        several = tuple(_tokens(each, vocab_size) for each in several)
    if not isinstance(stop, str) and isinstance(stop, Sequence) and not len(stop):
        return None
    if not several or not all(several):
        raise UserError(
            f"stop={stop!r}: must be texts, or sequences of tokens 0..{vocab_size - 1}, none of them empty"
        )
    if texts and not hasattr(tokenizer, "pieces"):
        raise UserError(
            f"stop={stop!r}: texts need a tokenizer with `pieces`; give what `load` returns as the target, or tokens"
        )
    if texts and any("\ud800" <= character <= "\udfff" for text in several for character in text):
        raise UserError(f"stop={stop!r}: has a part of a character; give whole ones")
    if sum(map(len, several)) > MOST_STATES // 4:
        raise UserError(
            f"stop: has {sum(map(len, several)):,} characters or tokens; give at most {MOST_STATES // 4:,}"
        )
    made = _automaton if isinstance(tokenizer, Hashable) else _automaton.__wrapped__
    return made(several, tokenizer if texts else None, vocab_size)


def _tokens(given: Any, vocab_size: int) -> tuple[int, ...]:
    """Returns a sequence of tokens as a tuple, or an empty one if it is something else."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):
        return ()
    if (
        array.ndim != 1
        or array.dtype.kind not in "iu"
        or np.any((array < 0) | (array >= vocab_size))
    ):
        return ()
    return tuple(array.tolist())


@functools.lru_cache(maxsize=64)
def _automaton(several: tuple[Any, ...], tokenizer: Any, vocab_size: int) -> Stop:
    """Returns the automaton over tokens; for texts, of what the tokenizer says that they spell."""
    if tokenizer is None:
        table = _transitions(several, vocab_size)
    else:
        table = _read(
            _transitions(tuple(text.encode() for text in several), 256),
            tokenizer.pieces,
            vocab_size,
        )
    padded = np.pad(table, ((0, -len(table) % BUCKET), (0, 0)))
    with jax.ensure_compile_time_eval():  # It is kept: inside a jit it would be that trace's.
        return Stop(jnp.asarray(padded, jnp.int16))


def _transitions(
    several: tuple[Sequence[int], ...], symbols: int
) -> Int[np.ndarray, "states symbols"]:
    """Returns the state after each symbol, of an automaton that stays in `MATCHED` once one of the patterns was read.

    Apart from `MATCHED`, a state is the longest beginning of a pattern that the symbols so far end with. After a symbol that
    does not continue it, it goes where the next shorter such beginning goes.
    """
    patterns = {tuple(pattern) for pattern in several}
    beginnings = sorted(
        {pattern[:length] for pattern in patterns for length in range(1, len(pattern))}, key=len
    )
    numbers = {(): START} | {
        beginning: MATCHED + 1 + index for index, beginning in enumerate(beginnings)
    }
    continued: dict[tuple[int, ...], list[int]] = {}
    for read in {*beginnings, *patterns}:
        continued.setdefault(read[:-1], []).append(read[-1])
    table = np.zeros((len(beginnings) + 2, symbols), np.int32)
    table[MATCHED] = MATCHED
    shorter = {START: START}
    for (
        beginning,
        number,
    ) in numbers.items():  # By length, so that the row of the shorter one is complete.
        if number not in shorter:
            continue  # Never reached: a pattern ends before.
        table[number] = table[shorter[number]]
        for symbol in continued.get(beginning, ()):
            read, end = (*beginning, symbol), int(table[number, symbol]) if beginning else START
            if end == MATCHED or read in patterns:
                table[number, symbol] = MATCHED
            else:
                table[number, symbol] = numbers[read]
                shorter[numbers[read]] = end
    return table


def _read(
    of_bytes: Int[np.ndarray, "states bytes"], pieces: Sequence[bytes], vocab_size: int
) -> Int[np.ndarray, "states vocab"]:
    """Returns the state after each token; a token without a piece spells nothing."""
    lengths = np.array(
        [len(piece) for piece in pieces[:vocab_size]] + [0] * max(vocab_size - len(pieces), 0)
    )
    table = np.repeat(np.arange(len(of_bytes))[:, None], vocab_size, axis=1)
    for place in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > place)
        read = np.array([pieces[token][place] for token in longer.tolist()])
        table[:, longer] = of_bytes[table[:, longer], read]
    return table


def before(text: str, stop: StopSpec) -> str:
    """Returns the text before the first stop text, or all of it if there is none; sequences of tokens do not count."""
    found = [text.find(each) for each in _texts(stop)]
    return text[: min((place for place in found if place >= 0), default=len(text))]


def settled(text: str, stop: StopSpec) -> int:
    """Returns how many characters of an unfinished text can be shown: those which no stop text can begin in."""
    text = before(text, stop)
    for count in range(min(len(text), max(map(len, _texts(stop)), default=0)), 0, -1):
        if any(each.startswith(text[-count:]) for each in _texts(stop)):
            return len(text) - count
    return len(text)


def _texts(stop: StopSpec) -> list[str]:
    if stop is None or isinstance(stop, Stop):
        return []
    return [stop] if isinstance(stop, str) else [each for each in stop if isinstance(each, str)]
