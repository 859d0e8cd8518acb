"""Atomic writes of files, and digests of their content."""

import hashlib
import json
import os
import pathlib
from typing import Any

from spectr_jax.errors import UserError


def write_whole(path: pathlib.Path, content: bytes | str) -> None:
    """Writes a file, or leaves the old one if the write is cut short."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def expanded(name: str | pathlib.Path) -> pathlib.Path:
    """The path that a user named, with `~` for a home.

    Raises:
      UserError: there is no such home.
    """
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"{str(name)!r} names the home of no user of this machine; write the path out") from error


def named(name: str | pathlib.Path) -> pathlib.Path:
    """`expanded`, with a last part to name a model after: `.` and `..` are written out."""
    path = expanded(name)
    return path.resolve() if path.name in ("", "..") else path


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes indented JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def digest(content: bytes) -> str:
    """The SHA-256 of a file's content, as of a tokenizer."""
    return hashlib.sha256(content).hexdigest()
