"""Atomic writes of files, digests of their content, and what users name."""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from spectr_jax.utils.errors import UserError

LFS_POINTER = b"version https://git-lfs"


def write_whole(path: pathlib.Path, content: bytes | str) -> None:
    """Writes a file, or leaves the old one if the write is cut short."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with naming(path):
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
    """Around the writing of a file: an error that names no file, such as that of a full disk, gets
    its path."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def expanded(name: str | pathlib.Path) -> pathlib.Path:
    """Returns the path that a user named, with `~` for a home.

    Raises:
      UserError: that user does not exist.
    """
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"{str(name)!r} cannot expand ~user; use an absolute path") from error


def named(name: str | pathlib.Path) -> pathlib.Path:
    """Returns `expanded`, with a last part to name a model after: `.` and `..` are written out."""
    path = expanded(name)
    return path.resolve() if path.name in ("", "..") else path


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes indented JSON, whole or not at all."""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def check_fetched(path: pathlib.Path) -> None:
    """Raises `UserError` for a pointer of Git LFS, which lies in a clone where a large file was not
    fetched."""
    with path.open("rb") as opened:
        pointer = opened.read(len(LFS_POINTER)) == LFS_POINTER
    if pointer:
        raise UserError(
            f"{str(path)!r} is a pointer of Git LFS, not the file itself; run 'git lfs pull' in "
            "its folder"
        )


def digest(content: bytes) -> str:
    """Returns the SHA-256 of a file's content, as of a tokenizer."""
    return hashlib.sha256(content).hexdigest()
