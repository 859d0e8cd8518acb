"""What ends a program early: an error of the user's, or a signal."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message names the value and the remedy, on one line."""


class Interrupted(Exception):
    """The user or the scheduler stopped the run; it saved, and goes on where the same command is given again."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Returns the error for a `name` that is none of the `known` ones, with the nearest ones suggested."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}")
