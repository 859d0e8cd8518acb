"""Decoded sequences in a terminal: tokens coloured by origin, columns, and a line of figures."""

import itertools
import operator
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from spectr_jax.sampling.answers import Totals
from spectr_jax.sampling.chat import Answer
from spectr_jax.sampling.session import Decoded, Speed, Token
from spectr_jax.sampling.trace import ACCEPTED, BONUS, CORRECTION

STYLES = {ACCEPTED: "32", CORRECTION: "4;31", BONUS: "1;34"}
"""SGR codes: accepted drafts green, corrections red and underlined, bonus tokens blue and bold."""
NAMES = {ACCEPTED: "accepted draft", CORRECTION: "correction", BONUS: "bonus token"}
GAP = "   "

Line: TypeAlias = list[tuple[str, str]]
"""Characters with their styles. Wrapping counts these, so colour codes take no room."""


def wants_colour() -> bool:
    """Returns whether stdout is a terminal and NO_COLOR is not set."""
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def figures(decoded: Decoded, speed: float | None = None, ratio: float | None = None) -> str:
    """Returns the line below a sequence, such as `otm_block: 43 tokens in 12 calls, 3.58 a call;
    910 tokens/s, 1.62 x baseline`."""
    line = _counts(decoded.method, len(decoded.tokens), len(decoded.calls))
    line += "" if speed is None else f"; {speed:,.0f} tokens/s"
    return line if ratio is None else f"{line}, {ratio:.2f} x baseline"


def answered(method: str, made: Answer) -> str:
    """Returns the line below an answer, such as `baseline: 43 tokens in 43 calls, 1.00 a call;
    the first after 0.4 s, then 62 tokens/s`."""
    line = f"{_counts(method, made.tokens, made.calls)}; the first after {made.first:.1f} s"
    line += f", then {made.speed:,.0f} tokens/s" if made.speed else ""
    return line if made.whole else f"{line}; cut off by --max_new_tokens"


def written(path: str, prompts: int, method: str, totals: Totals) -> str:
    """Returns the line of a file of answers, such as `answers.jsonl is finished, 40 answers; of this
    run 12, block: 743 tokens in 431 calls, 1.72 a call; 9 s with compilation`."""
    line = f"{path} is finished, {prompts} answer{'s' * (prompts > 1)}"
    if not totals.answers:
        return line
    counts = _counts(method, *totals[1:3])
    return (
        f"{line}; of this run {totals.answers}, {counts}; {totals.seconds:.0f} s with compilation"
    )


def _counts(method: str, tokens: int, calls: int) -> str:
    return f"{method}: {tokens} tokens in {calls} calls, {tokens / calls:.2f} a call"


def token(one: Token, colour: bool) -> str:
    """Returns one token as text."""
    return _painted(one.text, STYLES.get(one.origin, "") if colour else "")


def legend(colour: bool) -> str:
    """Returns the legend of the colours, or "" without colours."""
    names = (_painted(NAMES[origin], style) for origin, style in STYLES.items())
    return GAP.join(names) if colour else ""


def text(prompt: str, tokens: Iterable[Token], colour: bool) -> str:
    """Returns the prompt and its continuation as one string."""
    return prompt + "".join(token(one, colour) for one in tokens)


def columns(prompt: str, left: Decoded, right: Decoded, width: int, colour: bool) -> str:
    """Returns two continuations side by side in `width` characters, below their methods' names."""
    each = (width - len(GAP)) // 2

    def side(decoded: Decoded) -> list[Line]:
        name = [(letter, "") for letter in decoded.method]
        return [name, [], *_wrapped(_letters(prompt, decoded.tokens, colour), each)]

    blank: Line = []
    rows = itertools.zip_longest(side(left), side(right), fillvalue=blank)
    return "\n".join(
        (_line(one) + " " * (each - len(one)) + GAP + _line(other)).rstrip() for one, other in rows
    )


def speeds(speed: Speed, compared: Decoded | None, decoded: Decoded) -> list[str]:
    """Returns the lines of figures of the baseline, if shown, and of the method."""
    lines = [figures(compared, speed.baseline)] if compared else []
    same = decoded.method == "baseline"
    return [*lines, figures(decoded, speed.method, None if same else speed.ratio)]


def summary(measured: Sequence[tuple[Decoded, Speed]]) -> str:
    """Returns the line below several sequences, such as `block, 3 prompts: 1.75 tokens a call;
    210 tokens/s, 1.24 x baseline (medians; 1.13 x to 1.33 x)`."""
    tokens = sum(len(decoded.tokens) for decoded, _ in measured)
    calls = sum(len(decoded.calls) for decoded, _ in measured)
    ratios = sorted(speed.ratio for _, speed in measured)
    speed = statistics.median(speed.method for _, speed in measured)
    return (
        f"{measured[0][0].method}, {len(measured)} prompts: {tokens / calls:.2f} tokens a call; "
        f"{speed:,.0f} tokens/s, {statistics.median(ratios):.2f} x baseline "
        f"(medians; {ratios[0]:.2f} x to {ratios[-1]:.2f} x)"
    )


def _letters(prompt: str, tokens: Iterable[Token], colour: bool) -> Line:
    letters = [(letter, "") for letter in prompt]
    for token in tokens:
        style = STYLES.get(token.origin, "") if colour else ""
        letters += [(letter, style) for letter in token.text]
    return letters


def _wrapped(letters: Line, width: int) -> list[Line]:
    """Returns lines of at most `width` letters, broken at spaces where possible."""
    lines: list[Line] = [[]]
    for letter, style in letters:
        if letter == "\n":
            lines.append([])
            continue
        lines[-1].append((letter, style))
        if len(lines[-1]) > width:
            spaces = [place for place, (one, _) in enumerate(lines[-1]) if one == " "]
            end, begin = (spaces[-1], spaces[-1] + 1) if spaces else (width, width)
            lines.append(lines[-1][begin:])
            del lines[-2][end:]
    return lines


def _line(letters: Line) -> str:
    runs = itertools.groupby(letters, key=operator.itemgetter(1))
    return "".join(_painted("".join(letter for letter, _ in run), style) for style, run in runs)


def _painted(text: str, style: str) -> str:
    return f"\033[{style}m{text}\033[0m" if style and text else text
