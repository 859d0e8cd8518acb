"""Stop sequences: a continuation ends with the token that completes one of several strings.

A stop sequence is a string or a sequence of tokens. A string is matched on the bytes that the
tokens spell, across token boundaries; a string that names a control token is that token too. An
automaton (Aho and Corasick, 1975) takes one table lookup per token. The first match to be completed
ends the sequence. Its token may spell more after the stop string; `before` cuts both.
"""

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from spectr_jax.decoding.tree import PerRow
from spectr_jax.utils.errors import UserError

START, MATCHED = 0, 1
"""The states before any part of a stop sequence, and after a complete one."""

BUCKET = 16
"""The number of states is a multiple of this: stop sequences of similar lengths share a program."""

MOST_SYMBOLS = 1024
"""The largest total length of all stop sequences, in bytes or tokens; this bounds the table."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stop:
    """The automaton of stop sequences, which `prepared` returns and `decode` takes.

    Attributes:
      table: [states, V] int16, the next state for each token.
    """

    table: Int[Array, "states vocab"]

    def follow(
        self, states_B: PerRow, tokens_BxS: Int[Array, "batch steps"]
    ) -> Int[Array, "batch steps"]:
        """Returns the state after each token of a call, given the states before the call."""
        after = []
        for tokens_B in jnp.maximum(tokens_BxS.T, 0):
            states_B = self.table[states_B, tokens_B].astype(jnp.int32)
            after.append(states_B)
        return jnp.stack(after, axis=1)

    def never(self) -> "Stop":
        """Returns an automaton of the same shape that stops nothing."""
        return Stop(jnp.zeros_like(self.table))


StopSpec: TypeAlias = Stop | str | Sequence[str] | Sequence[Sequence[int]] | None


def prepared(stop: StopSpec, tokenizer: Any, vocab_size: int) -> Stop | None:
    """Returns the automaton of stop sequences, or None if there are none.

    Args:
      stop: a string, several strings, or several token sequences.
      tokenizer: the model's, for strings; None if there is none.
      vocab_size: the model's.

    Raises:
      UserError: `stop` is something else, or the tokenizer has no `pieces`.
    """
    if isinstance(stop, Stop) and stop.table.shape[1] != vocab_size:
        given = f"is for {stop.table.shape[1]} tokens, but the model has {vocab_size}"
        raise UserError(f"stop: {given}; prepare it for this model")
    if stop is None or isinstance(stop, Stop):
        return stop
    alone = isinstance(stop, str) or not isinstance(stop, Iterable)
    several: tuple[Any, ...] = (stop,) if alone else tuple(stop)
    if not several:
        return None
    are_strings = all(isinstance(each, str) and each for each in several)
    if not are_strings:
        several = tuple(_tokens(each, vocab_size) for each in several)
    if not all(several):
        wanted = f"must be strings, or sequences of tokens 0..{vocab_size - 1}, none empty"
        raise UserError(f"stop={stop!r}: {wanted}")
    if are_strings and not hasattr(tokenizer, "pieces"):
        hint = "give the output of `load` as the target, or give tokens"
        raise UserError(f"stop={stop!r}: strings need a tokenizer with `pieces`; {hint}")
    if are_strings and any("\ud800" <= character <= "\udfff" for character in "".join(several)):
        raise UserError(f"stop={stop!r}: is not valid Unicode; give whole characters")
    length = sum(len(text.encode() if are_strings else text) for text in several)
    if length > MOST_SYMBOLS:
        most = f"give at most {MOST_SYMBOLS:,}"
        raise UserError(f"stop: has {length:,} bytes or tokens in total; {most}")
    made = _automaton if isinstance(tokenizer, Hashable) else _automaton.__wrapped__
    return made(several, tokenizer if are_strings else None, vocab_size)


def _tokens(given: Any, vocab_size: int) -> tuple[int, ...]:
    """Returns `given` as a tuple of tokens, or an empty tuple if it is something else."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):
        return ()
    is_integers = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_integers or np.any((array < 0) | (array >= vocab_size)):
        return ()
    return tuple(array.tolist())


@functools.lru_cache(maxsize=64)
def _automaton(several: tuple[Any, ...], tokenizer: Any, vocab_size: int) -> Stop:
    """Returns the automaton over tokens; with a tokenizer, `several` are strings."""
    if tokenizer is None:
        table = _transitions(several, vocab_size)
    else:
        of_bytes = _transitions(tuple(text.encode() for text in several), 256)
        table = _read(of_bytes, tokenizer.pieces, vocab_size)
        table[:, _named(several, tokenizer, vocab_size)] = MATCHED
    padded = np.pad(table, ((0, -len(table) % BUCKET), (0, 0)))
    with jax.ensure_compile_time_eval():  # The cache must not hold a tracer.
        return Stop(jnp.asarray(padded, jnp.int16))


def _transitions(
    several: tuple[Sequence[int], ...], symbols: int
) -> Int[np.ndarray, "states symbols"]:
    """Returns the next state for each symbol; `MATCHED` is final.

    Any other state is the longest prefix of a pattern that is a suffix of the symbols read so far.
    A symbol that does not extend this prefix has the next state of the next shorter such prefix.
    """
    patterns = {tuple(pattern) for pattern in several}
    prefixes = {pattern[:length] for pattern in patterns for length in range(1, len(pattern))}
    numbers: dict[tuple[int, ...], int] = {(): START}
    numbers |= {prefix: n for n, prefix in enumerate(sorted(prefixes, key=len), MATCHED + 1)}
    continued: dict[tuple[int, ...], list[int]] = {}
    for read in prefixes | patterns:
        continued.setdefault(read[:-1], []).append(read[-1])
    table = np.zeros((len(prefixes) + 2, symbols), np.int32)
    table[MATCHED] = MATCHED
    shorter = {START: START}
    for prefix, number in numbers.items():  # By length: the shorter prefix's row is complete.
        if number not in shorter:
            continue  # This state is never reached: a shorter pattern matches first.
        table[number] = table[shorter[number]]
        for symbol in continued.get(prefix, ()):
            read, end = (*prefix, symbol), int(table[number, symbol]) if prefix else START
            if end == MATCHED or read in patterns:
                table[number, symbol] = MATCHED
            else:
                table[number, symbol] = numbers[read]
                shorter[numbers[read]] = end
    return table


def _named(several: tuple[str, ...], tokenizer: Any, vocab_size: int) -> list[int]:
    """Returns the control tokens that stop strings name. They spell nothing."""
    names = getattr(tokenizer, "tokens", None) or []
    pairs = enumerate(zip(names[:vocab_size], tokenizer.pieces, strict=False))
    return [token for token, (name, piece) in pairs if not piece and name in several]


def _read(
    of_bytes: Int[np.ndarray, "states bytes"], pieces: Sequence[bytes], vocab_size: int
) -> Int[np.ndarray, "states vocab"]:
    """Returns the next state for each token; a token without a piece spells nothing."""
    lengths = np.zeros(vocab_size, np.int64)
    lengths[: len(pieces)] = [len(piece) for piece in pieces[:vocab_size]]
    table = np.repeat(np.arange(len(of_bytes))[:, None], vocab_size, axis=1)
    for place in range(int(lengths.max(initial=0))):
        longer = np.flatnonzero(lengths > place)
        read = np.array([pieces[token][place] for token in longer.tolist()])
        table[:, longer] = of_bytes[table[:, longer], read]
    return table


def before(text: str, stop: StopSpec) -> str:
    """Returns `text` up to the first stop string to be completed, or all of it.

    Of several that are completed by the same character, the longest counts. Stop tokens are
    ignored.
    """
    found = [(text.find(each) + len(each), text.find(each)) for each in _strings(stop)]
    _, start = min((match for match in found if match[1] >= 0), default=(0, len(text)))
    return text[:start]


def dropped_space(tokenizer: Any, tokens: Sequence[int], text: str, stop: StopSpec) -> str:
    """Returns the space before the `text` of new tokens that some tokenizers drop, or "".

    Stop strings are matched in the text with this space.
    """
    if not _strings(stop) or text.startswith(" "):
        return ""
    pieces = (tokenizer.pieces[token] for token in tokens if token < len(tokenizer.pieces))
    return " " if next(filter(None, pieces), b"").startswith(b" ") else ""


def settled(text: str, stop: StopSpec) -> int:
    """Returns how many leading characters of `text` can no longer be cut by a stop string."""
    text = before(text, stop)
    longest = max(map(len, _strings(stop)), default=0)
    for count in range(min(len(text), longest), 0, -1):
        if any(each.startswith(text[-count:]) for each in _strings(stop)):
            return len(text) - count
    return len(text)


def _strings(stop: StopSpec) -> list[str]:
    """Returns the stop strings."""
    if stop is None or isinstance(stop, Stop):
        return []
    return [stop] if isinstance(stop, str) else [each for each in stop if isinstance(each, str)]
