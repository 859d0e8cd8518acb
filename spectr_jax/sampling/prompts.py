r"""Prompts from the command line, a file or stdin. Blank lines are skipped.

As in a corpus, only \n and \r\n end a line, and a byte-order mark at the start is dropped.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import TextIO

from spectr_jax.sampling.session import shortened
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded, lines_of, read_text


def from_flags(texts: Sequence[str]) -> list[str]:
    """Returns the prompts of --prompt; raises `UserError` if one is not UTF-8."""
    for text in texts:
        try:
            # Python keeps undecodable bytes of arguments as surrogates, which no tokenizer takes.
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"--prompt={shortened(text)!r}: is not UTF-8; convert it, for example with iconv"
            ) from error
    return list(texts)


def from_file(path: str) -> list[str]:
    """Returns the prompts of a text file, one per line.

    Raises:
      UserError: the file cannot be read, is not UTF-8, or has no prompt.
    """
    try:
        lines = lines_of(read_text(expanded(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--file={path}: cannot be read ({error}); give a text file with one prompt per line"
        ) from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--file={path}: has no prompt; write one per line")
    return prompts


def from_stdin(stdin: TextIO | None) -> Iterator[str]:
    """Yields the prompts of stdin as they arrive, one per line; it is None if the shell closed it.

    Raises:
      UserError: stdin has no prompt, or a line is not UTF-8.
    """
    nothing = UserError("no prompt on stdin; give --prompt=TEXT or --file=FILE")
    if stdin is None:
        raise nothing
    return _lines(stdin, nothing)


def _lines(stdin: TextIO, nothing: UserError) -> Iterator[str]:
    found = False
    try:
        if isinstance(stdin, io.TextIOWrapper):
            with contextlib.suppress(io.UnsupportedOperation):  # Something has been read already.
                stdin.reconfigure(newline="\n")  # By default \r alone ends a line too.
        for number, line in enumerate(stdin):
            line.encode()  # In the C locale surrogates are kept here too.
            text = line if number else line.removeprefix("\ufeff")
            if text.strip():
                found = True
                yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeError as error:
        raise UserError(
            f"stdin cannot be read ({error}); give text with one prompt per line"
        ) from error
    if not found:
        raise nothing
