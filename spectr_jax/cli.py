"""What the entry points share: flags in, one line on stderr and exit status 2 for bad input."""

import os
import pathlib
import sys
from collections.abc import Callable
from typing import NoReturn

from absl import app, flags, logging

from spectr_jax.errors import UserError


def run(main: Callable[[], None]) -> None:
    """Parses the flags and runs `main`; an error of the user's is one line, without a traceback."""

    def guarded(_):
        logging.set_verbosity(logging.WARNING)  # Orbax tells of every file at INFO.
        _keep_programs()
        try:
            main()
        except UserError as error:
            _exit(str(error))

    app.run(guarded, flags_parser=_parse)


def _keep_programs() -> None:
    """Keeps compiled programs for the next start, in JAX_COMPILATION_CACHE_DIR or the user's cache folder."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(caches, "spectr_jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _parse(argv: list[str]) -> list[str]:
    try:
        left = flags.FLAGS(argv)
        if "config" in flags.FLAGS and flags.FLAGS.config is not None:
            flags.FLAGS.config.keys()  # A config file that failed to load says so only when it is used.
        return left
    except (flags.Error, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        _exit(_reason(error))


def _reason(error: BaseException) -> str:
    """The line that helps, of what absl and ml_collections raise for a flag or a config file."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = next((line for line in lines if "UserError: " in line), None)
    if told:  # Raised in a config file: ml_collections quotes the whole traceback.
        return told.split("UserError: ", 1)[1]
    if isinstance(error, AttributeError | KeyError):
        return f"unknown config field {lines[0].strip(chr(34))}; the fields are listed in spectr_jax/config.py"
    if isinstance(error, OSError):
        return f"the config file cannot be loaded: {lines[-1]}; check the path"
    return f"{lines[0]}; see --help"


def _exit(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
