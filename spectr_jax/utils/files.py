"""Reading of text, atomic writes of files, digests of their content, and expansion of user-given
paths."""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from spectr_jax.utils.errors import UserError

LFS_POINTER = b"version https://git-lfs"


def read_text(path: pathlib.Path) -> str:
    """Returns the text of a UTF-8 file, without a byte-order mark. Raises OSError or ValueError."""
    return path.read_bytes().decode("utf-8-sig")


def lines_of(text: str) -> list[str]:
    r"""Returns the lines of a text. Only \n and \r\n end a line.

    `str.splitlines` also splits at form feeds, U+0085 and U+2028, which sentences and JSON strings
    may contain.
    """
    return [line.removesuffix("\r") for line in text.split("\n")]


def parse_json(text: str) -> Any:
    """Returns a JSON value. Raises ValueError, also if it is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_whole(path: pathlib.Path, content: bytes | str) -> None:
    """Writes a file atomically: if the write fails, the old file stays.

    A link stays a link, and the new file has the old one's mode.
    """
    real = path.resolve()
    partial = real.with_name(f"{real.name}.{os.getpid()}.partial")
    try:
        with path_in_errors(path):
            partial.write_bytes(content.encode() if isinstance(content, str) else content)
            if real.exists():
                shutil.copymode(real, partial)
            partial.replace(real)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def lock(file: IO[Any], taken: str) -> None:
    """Locks an open file until this process closes it or ends; raises `UserError(taken)` if another
    process has the lock."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(taken) from error


@contextlib.contextmanager
def exclusive(path: pathlib.Path) -> Iterator[None]:
    """A context that one process at a time can be in, to make `path`; the others wait, and should
    then look whether it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that makes {path}", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def write_figure(path: pathlib.Path, figure: Any) -> None:
    """Writes a figure of matplotlib as PNG, atomically."""
    content = io.BytesIO()
    figure.savefig(content, dpi=120, format="png")
    write_whole(path, content.getvalue())


@contextlib.contextmanager
def path_in_errors(path: pathlib.Path) -> Iterator[None]:
    """A context that adds `path` to an `OSError` without a file name, as of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def expanded(name: str | pathlib.Path) -> pathlib.Path:
    """Returns a user-given path with `~` expanded.

    Raises:
      UserError: there is no such user, or it is a URL, which would become a local folder.
    """
    # pathlib turns two slashes into one.
    if re.match(r"\w[\w+.-]*://|(file|gs|s3|hdfs|https?):/", str(name)):
        raise UserError(
            f"{str(name)!r} is a URL; give a local path, for example of a mounted bucket"
        )
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        raise UserError(f"{str(name)!r} cannot expand ~user; use an absolute path") from error


def expanded_with_name(name: str | pathlib.Path) -> pathlib.Path:
    """Returns `expanded(name)` with a last `.` or `..` resolved, so that it ends in a name."""
    path = expanded(name)
    return path.resolve() if path.name in ("", "..") else path


def checked_path(flag: str, name: str) -> pathlib.Path:
    """Returns the path of a file that --FLAG=NAME asks to write, checked before any long work.

    Raises:
      UserError: the file cannot be written.
    """
    if not name:
        raise UserError(f"--{flag} is empty; name a file")
    path, given = expanded(name), f"--{flag}={name}"
    try:
        if path.is_dir():
            raise UserError(f"{given}: is a folder; name a file in it")
        if path.exists() and not path.is_file():  # Writing would replace a device.
            raise UserError(f"{given}: is not a file; choose another")
        if not path.resolve().parent.is_dir():
            raise UserError(f"{given}: is in a folder that does not exist; create it first")
        # Permissions alone do not decide: root has all of them, even on a read-only file system.
        tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.name}.", suffix=".partial"
        ).close()
    except OSError as error:
        raise UserError(f"{given}: cannot be written ({error}); choose another file") from error
    return path


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes indented JSON atomically."""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises `UserError` if it is missing or damaged."""
    try:
        given = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(
            f"{str(path)!r} cannot be read ({reason}); save or fetch it again"
        ) from error
    if not isinstance(given, dict):
        raise UserError(f"{str(path)!r} is not a JSON object; save or fetch it again")
    return given


def check_fetched(path: pathlib.Path) -> None:
    """Raises `UserError` if the file is a pointer of Git LFS, whose content was not fetched."""
    with path.open("rb") as opened:
        if opened.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UserError(
                f"{str(path)!r} is a pointer of Git LFS, not the file itself; run 'git lfs pull'"
            )


def digest(content: bytes) -> str:
    """Returns the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()
