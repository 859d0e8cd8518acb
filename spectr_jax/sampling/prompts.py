r"""Prompts from the command line, a file or stdin. Blank lines are skipped.

As in a corpus, only \n and \r\n end a line, and a byte-order mark at the start is dropped.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import TextIO

from spectr_jax.sampling.session import shortened
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded, lines_of, parse_json, read_text


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


def from_file(path: str) -> dict[int, str]:
    """Returns the prompts of a file by the number of their line.

    Args:
      path: text with one prompt per line. If its name ends in .jsonl or .json, each line is a JSON
        string, or an object with a "prompt".

    Raises:
      UserError: the file cannot be read, is not UTF-8, has a line without a prompt, or is empty.
    """
    try:
        lines = lines_of(read_text(expanded(path)))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--file={path}: cannot be read ({error}); give a text file with one prompt per line"
        ) from error
    prompts = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    if not prompts:
        raise UserError(f"--file={path}: has no prompt; write one per line")
    if not path.lower().endswith((".jsonl", ".json")):
        return prompts
    return {
        number: _from_json(f"--file={path}: line {number}", line)
        for number, line in prompts.items()
    }


def _from_json(place: str, line: str) -> str:
    """Returns the prompt of a JSON line; raises `UserError` if it has none."""
    wanted = 'give a JSON string that is not blank, or an object with such a "prompt"'
    try:
        value = parse_json(line)
        prompt = value["prompt"] if isinstance(value, dict) else value
        if isinstance(prompt, str):
            prompt.encode()  # Escapes can spell half a character, which no tokenizer takes.
    except KeyError as error:
        raise UserError(f'{place} has no "prompt"; {wanted}') from error
    except ValueError as error:
        raise UserError(f"{place} is not JSON ({error}); {wanted}") from error
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{place} has the prompt {prompt!r:.60}; {wanted}")
    return prompt


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
