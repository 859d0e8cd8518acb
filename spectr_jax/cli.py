"""What the entry points share: flags in, one line on stderr and exit status 2 for bad input."""

import os
import pathlib
import sys
from collections.abc import Callable
from typing import NoReturn

from absl import app, flags, logging

from spectr_jax.errors import Interrupted, UserError

INTERRUPTED = 75
"""Exit status of a run that was stopped and saved: "try again" (EX_TEMPFAIL in sysexits.h)."""


def define_process_flags() -> None:
    """The flags of a program that several processes can run as one."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, where several processes are one run.")
    flags.DEFINE_integer("processes", None, "How many processes there are.")
    flags.DEFINE_integer("process_id", None, "The index of this process, from 0.")
    flags.DEFINE_bool("distributed", False, "Ask the environment for these three: on TPU pods, Slurm, Open MPI.")


def run(main: Callable[[], None]) -> None:
    """Parses the flags and runs `main`; an error of the user's is one line, without a traceback."""

    def guarded(_):
        logging.set_verbosity(logging.WARNING)  # Orbax tells of every file at INFO.
        distributed = _process_flags()
        try:
            if distributed is not None:
                from spectr_jax import hosts

                hosts.connect(**distributed)
            _keep_programs()
            main()
        except UserError as error:
            _exit(str(error), at_once=distributed is not None)
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            sys.exit(INTERRUPTED)

    app.run(guarded, flags_parser=_parse)


def _process_flags() -> dict | None:
    """The arguments of `hosts.connect`, or None for a process on its own."""
    if "coordinator" not in flags.FLAGS:
        return None
    found = {
        "coordinator": flags.FLAGS.coordinator,
        "processes": flags.FLAGS.processes,
        "process": flags.FLAGS.process_id,
    }
    return found if flags.FLAGS.distributed or any(value is not None for value in found.values()) else None


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


def _exit(message: str, at_once: bool = False) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    if at_once:  # JAX would wait at exit for the other processes, which wait for this one.
        os._exit(2)
    sys.exit(2)
