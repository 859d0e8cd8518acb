"""Exceptions that end a program with one line: bad input, or a signal."""

import difflib
import errno
import pathlib
from collections.abc import Iterable

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_REFUSED = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP),
)
EXTRAS = {
    "train": (
        *("array_record", "grain", "importlib_resources", "matplotlib", "ml_collections"),
        *("optax", "orbax", "tensorflow_datasets"),
    ),
    "hf": ("gguf", "huggingface_hub", "jinja2", "tokenizers"),
}
"""Modules that each extra of pyproject.toml installs. `eval` installs those of `train`."""


class UserError(ValueError):
    """Bad input. The message is one line that names the value and the remedy."""


class Interrupted(Exception):
    """The user or the scheduler stopped the run. It is saved, and the same command resumes it."""


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """Returns the error for an unknown `name`, with the nearest of the `known` names."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    near = near or [
        each for each in known if difflib.get_close_matches(str(name), each.split("_"), n=1)
    ]
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {name!r}; {hint}known: {', '.join(known)}")


def first_line(error: BaseException, otherwise: str = "") -> str:
    """Returns the first line of an error's message, or else `otherwise` or the error's type."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else otherwise or type(error).__name__


def explain(error: BaseException, output: str | None = None) -> str | None:
    """Returns one line that tells the user what to do, or None if the error is a bug of ours.

    Besides `UserError` these are: too little memory, a missing device, a missing package of an
    extra, and errors of the file system about a path, its permissions or a full disk. Programs
    check files before they read them, so a missing file is a bug, except inside the folder
    `output`, which somebody may have removed.
    """
    if isinstance(error, UserError):
        return str(error)
    reason = first_line(error, "host")
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in reason:
        return f"out of memory ({reason}); use a smaller batch_size or smaller models"
    if isinstance(error, RuntimeError) and reason.startswith("Unable to initialize backend"):
        return f"JAX does not find its device ({reason}); unset JAX_PLATFORMS, or set it to cpu"
    if isinstance(error, ModuleNotFoundError):
        return _missing(error)
    if not isinstance(error, OSError):
        return None
    path = f"{str(error.filename or 'a file')!r}"
    if error.errno in FULL:
        return f"{path} cannot be written ({error.strerror}); free some space and run it again"
    parents = pathlib.Path(str(error.filename or "")).parents
    gone = error.errno == errno.ENOENT and output is not None and pathlib.Path(output) in parents
    if gone or error.errno in _REFUSED:
        return (
            f"{path} cannot be used ({error.strerror}); choose another path or fix its permissions"
        )
    return None


def check_device() -> None:
    """Raises `UserError` if JAX_PLATFORMS names a device that JAX does not find.

    JAX itself reports some missing platforms with an assertion only.
    """
    import jax

    platforms = jax.config.values["jax_platforms"]
    if not platforms:
        return
    try:
        jax.local_devices()
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error, "no plugin for it is installed")
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX does not find this device ({reason}); unset "
            "JAX_PLATFORMS, or set it to cpu"
        ) from error


def _missing(error: ModuleNotFoundError) -> str | None:
    """Returns the line for a missing module of an extra, or None for any other module."""
    module = (error.name or "").partition(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            install = f"pip install 'spectr_jax[{extra}]', or -e '.[{extra}]' in a clone"
            return f"{module} is not installed; run {install}"
    return None
