"""What the entry points share: flags, help, and user errors as one line on stderr with exit
status 2."""

import contextlib
import functools
import gc
import importlib
import os
import pathlib
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from absl import app, flags, logging

from spectr_jax.utils.errors import Interrupted, UserError, check_device, explain, first_line
from spectr_jax.utils.files import expanded

BAD_INPUT, INTERRUPTED, CTRL_C, CLOSED_PIPE = 2, 75, 130, 141
"""Exit statuses, explained in `_STATUS_HELP`. 75 is EX_TEMPFAIL of sysexits.h; the last two are 128
plus the number of a signal, as in shells."""

flags.DEFINE_bool("verbose", False, "Print the traceback of an error above its one-line message.")

_CONFIG_HELP = """
Set any field of the config with --config.FIELD=VALUE, such as --config.batch_size=64.
The fields and their defaults are in config.py of spectr_jax/training, distillation
and experiments. configs/ has examples.
"""
_STATUS_HELP = f"""
Exit status:
  0    done
  {BAD_INPUT}    bad input, full disk or out of memory: one line on stderr says what to do
{{saved}}  {CTRL_C}  stopped by Ctrl-C
  {CLOSED_PIPE}  the pipe that it prints to was closed
  1    a bug: please report its traceback
"""


class _Terminated(KeyboardInterrupt):
    """Raised by SIGTERM in a program that can be resumed."""


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A context for imports before flags are parsed: a missing package becomes a one-line error."""
    try:
        yield
    except ModuleNotFoundError as error:
        line = explain(error)
        if line is None:
            raise
        _exit(f"error: {line}", error)


def define_process_flags() -> None:
    """Defines the flags of a program that can run on several processes."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0, with several processes.")
    flags.DEFINE_integer("processes", None, "The number of processes of the run.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "The index of this process, from 0.")
    flags.DEFINE_bool(
        "distributed",
        False,
        "Take coordinator, processes and process_id from the environment (TPU pods, Slurm, Open "
        "MPI).",
    )


def define_import_flag() -> None:
    """Defines --import, for programs that take user-registered methods or models."""
    flags.DEFINE_multi_string(
        "import",
        [],
        "Modules to import first, a.b,c, such as one that registers a method or a loader; may be "
        "given several times.",
    )


def _import_modules() -> None:
    """Imports the modules that --import names, also from the current folder."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in ",".join(flags.FLAGS["import"].value or []).split(","):
        try:
            if name.strip():
                importlib.import_module(name.strip())
        except (Exception, SystemExit) as error:  # User code may raise anything.
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(
                f"--import={name.strip()} fails ({reason}); fix it, or name a module that is "
                "installed or in the current folder, without .py"
            ) from error


def run(
    main: Callable[[], None], output: flags.FlagHolder | None = None, resumes: bool = True
) -> None:
    """Parses the flags and runs `main`. A user error becomes one line without a traceback
    (`errors.explain`).

    `main` raises `UserError` for bad input, and `Interrupted` once a stopped run is saved. `output`
    is the flag that names the output folder, which is checked before any long work. With one, the
    same command resumes after Ctrl-C, unless `resumes` is False.
    """

    def guarded(_):
        # Tracing makes many lasting objects; scanning them often takes 0.7 s of a chat's start.
        gc.set_threshold(10_000)
        logging.set_verbosity(logging.WARNING)  # Orbax logs every file at INFO.
        processes = _process_flags()
        exit_with = functools.partial(_exit, at_once=processes is not None)
        try:
            if output is not None:
                _check_output(output)
                if processes is None:  # With several, JAX's preemption service handles it.
                    signal.signal(signal.SIGTERM, _terminate)
            if processes is not None:
                from spectr_jax.utils import hosts

                hosts.connect(*processes)
            check_device()
            _keep_programs()
            if "import" in flags.FLAGS:
                _import_modules()
            with _quiet_end(at_once=processes is not None):
                main()
        except Interrupted as stopped:
            print(stopped, file=sys.stderr)
            sys.exit(INTERRUPTED)
        except KeyboardInterrupt as error:
            hint = "; the same command resumes" if output is not None and resumes else ""
            status = INTERRUPTED if isinstance(error, _Terminated) else CTRL_C
            exit_with(f"interrupted{hint}", error, status)
        except Exception as error:
            line = explain(error, None if output is None else os.path.expanduser(output.value))
            if line is None:
                raise
            exit_with(f"error: {line}", error)

    app.run(guarded, flags_parser=functools.partial(_parse, output is not None))


def _terminate(*_) -> NoReturn:
    raise _Terminated


@contextlib.contextmanager
def _quiet_end(at_once: bool = False) -> Iterator[None]:
    """A context that exits silently if the program's output goes to a closed pipe."""
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()  # Python's own flush at exit would print an error.
    except BrokenPipeError:
        outputs = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream is not None]
        closed = [output for output in outputs if _is_closed_pipe(output)]
        if not closed:  # The error is about another pipe.
            raise
        for output in closed:
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # For the remaining output.
        if at_once:
            os._exit(CLOSED_PIPE)
        sys.exit(CLOSED_PIPE)


def _is_closed_pipe(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)  # Errors are reported whatever events are requested.
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _process_flags() -> list[Any] | None:
    """Returns the arguments of `hosts.connect`, or None for a single process."""
    if "coordinator" not in flags.FLAGS:
        return None
    found = [flags.FLAGS[name].value for name in ("coordinator", "processes", "process_id")]
    given = flags.FLAGS.distributed or any(value is not None for value in found)
    return found if given else None


def _check_output(flag: flags.FlagHolder) -> None:
    """Raises `UserError` unless the folder is writable or can be created."""
    if not flag.value:
        raise UserError(f"--{flag.name} is empty; name a folder")
    path = expanded(flag.value)
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK):
        return
    problem = "cannot be written to" if nearest.is_dir() else "is not a folder"
    raise UserError(f"--{flag.name}={flag.value}: {str(nearest)!r} {problem}; choose another")


def _keep_programs() -> None:
    """Caches compiled programs in JAX_COMPILATION_CACHE_DIR or in the user's cache folder."""
    import jax

    if jax.config.values["jax_compilation_cache_dir"] is None:
        caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(caches, "spectr_jax")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _parse(writes: bool, argv: list[str]) -> list[str]:
    """Parses the flags and returns an empty list: other arguments are an error.

    `writes` says whether the program writes to a folder, for the help.
    """
    _extend_help(writes)
    try:
        with _quiet_end():
            left = flags.FLAGS(argv)[1:]
        if left:
            raise UserError(
                f"unexpected argument {' '.join(left)!r}; give values as --FLAG=VALUE, see --help"
            )
        # Reading `config` raises an error if its file could not be loaded.
        if "config" in flags.FLAGS and not hasattr(flags.FLAGS.config, "keys"):
            raise UserError(
                f"get_config() returns {flags.FLAGS.config!r}; return a config of spectr_jax"
            )
        return left
    except SystemExit as error:
        if error.code == CLOSED_PIPE:
            raise
        if _raised_in(error) != "absl.app":
            _exit("error: the config file calls sys.exit; let it return a config", error)
        with _quiet_end():  # absl exits with 1 after --help.
            pass
        sys.exit(0)
    except KeyboardInterrupt as error:
        _exit("interrupted", error, CTRL_C)
    except Exception as error:  # A config file may raise anything.
        _exit(f"error: {_reason(error)}", error)


def _raised_in(error: BaseException) -> str:
    """Returns the name of the module that raised `error`."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "")


def _extend_help(writes: bool) -> None:
    """Adds the flags of this module and the exit statuses to absl's --help."""
    for flag in flags.FLAGS.get_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    needed = [
        f"--{name}"
        for name in flags.FLAGS
        if any("than None" in check.message for check in flags.FLAGS[name].validators)
    ]
    program = sys.modules["__main__"]
    parts = [program.__doc__ or "", _CONFIG_HELP if "config" in flags.FLAGS else ""]
    parts.append(f"\nRequired: {', '.join(needed)}\n" if needed else "")
    saved = (
        f"  {INTERRUPTED}   stopped by SIGTERM, or a training by Ctrl-C: the same command resumes\n"
    )
    program.__doc__ = "".join([*parts, _STATUS_HELP.format(saved=saved if writes else "")])


def _reason(error: Exception) -> str:
    """Returns a one-line message for an error of absl, ml_collections or a config file."""
    text = str(error).strip()
    if "UserError: " in text:  # Raised in a config file: ml_collections quotes the whole traceback.
        return text.split("UserError: ", 1)[1]
    if missing := re.findall(r"Flag (--\w+) must have a value", text):
        return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; see --help"
    if isinstance(error, UserError):
        return text
    if isinstance(error, flags.Error):
        return f"{text.splitlines()[0].rstrip('.')}; see --help"
    if isinstance(error, AttributeError | KeyError) and "get_config" not in text:
        # Some messages are quoted twice.
        text = text.strip('"').replace("\\n", "; ").replace("\\'", "'")
        return f"unknown config field {text}; config.py of spectr_jax/training, distillation or experiments lists them"
    if isinstance(error, OSError):
        return f"the config file cannot be loaded: {text.splitlines()[-1].strip()}; check the path"
    return f"the config file fails: {type(error).__name__}: {text}; fix it (--verbose shows where)"


def _exit(
    line: str, error: BaseException, status: int = BAD_INPUT, at_once: bool = False
) -> NoReturn:
    """Prints `line`, after the traceback if --verbose is given, and exits.

    With `at_once` it skips the handlers of JAX, which would wait for processes that wait for this
    one.
    """
    # The flag may follow one that was not parsed.
    if flags.FLAGS["verbose"].value or "--verbose" in sys.argv:
        traceback.print_exception(error)
    print(" ".join(part.strip() for part in line.splitlines()), file=sys.stderr, flush=True)
    if at_once:
        os._exit(status)
    sys.exit(status)
