"""What the entry points share: flags, help, and user errors as one line on stderr with exit
status 2."""

import contextlib
import difflib
import gc
import importlib
import os
import pathlib
import re
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
  {INTERRUPTED}   stopped by Ctrl-C or SIGTERM: the same command resumes
  {CTRL_C}  stopped by Ctrl-C, with nothing to resume
  {CLOSED_PIPE}  the pipe that it prints to was closed
  1    a bug: please report its traceback
"""


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
    program = sys.modules["__main__"]
    config_help = _CONFIG_HELP if "config" in flags.FLAGS else ""
    program.__doc__ = f"{program.__doc__ or ''}{config_help}{_STATUS_HELP}"
    for flag in flags.FLAGS.get_flags_for_module(__name__):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    try:
        try:
            app.run(lambda _: _start(main, output), flags_parser=_parse)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # Python's own flush at exit would print an error.
    except BrokenPipeError as error:
        for closed in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), closed)  # For the remaining output.
        _exit("", error, CLOSED_PIPE)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(INTERRUPTED)
    except KeyboardInterrupt as error:
        if output is None or not resumes:
            _exit("interrupted", error, CTRL_C)
        _exit("interrupted; the same command resumes", error, INTERRUPTED)
    except Exception as error:
        folder = None if output is None else flags.FLAGS[output.name].value
        line = explain(error, folder and os.path.expanduser(folder))
        if line is None:
            raise
        _exit(f"error: {line}", error)


def _parse(argv: list[str]) -> list[str]:
    """Parses the flags and returns an empty list: other arguments are an error."""
    try:
        left = flags.FLAGS(argv)[1:]
        # Reading `config` raises an error if its file could not be loaded.
        if "config" in flags.FLAGS and not hasattr(flags.FLAGS.config, "keys"):
            returned = f"get_config() returns {flags.FLAGS.config!r}"
            raise TypeError(f"{returned}, and must return a config of spectr_jax")
    except SystemExit as error:
        if any(argument.startswith(("--help", "-help", "-?")) for argument in argv):
            sys.exit(0)  # absl exits with 1 after --help.
        raise UserError("the config file calls sys.exit; let it return a config") from error
    except BrokenPipeError:  # The output of --help.
        raise
    except Exception as error:  # A config file may raise anything.
        # ml_collections quotes the whole traceback of a config file's ValueError.
        reason = str(error).strip().splitlines()[-1].strip(" .")
        _explain_config(argv, reason, error)
        if isinstance(error, flags.Error):
            reason = reason.removeprefix("spectr_jax.utils.errors.UserError: ")
            raise UserError(f"{reason}; see --help") from error
        if isinstance(error, AttributeError) and isinstance(error.args[0], KeyError):
            where = "config.py of spectr_jax/training, distillation or experiments lists them"
            name, *meant = re.findall(r"['\"](.*?)['\"]", error.args[0].args[0])
            hint = f"did you mean {meant[0]!r}? " if meant else ""
            raise UserError(f"unknown config field {name!r}; {hint}{where}") from error
        reason = f"{type(error).__name__}: {reason}"
        raise UserError(
            f"the config file fails: {reason}; fix it (--verbose shows where)"
        ) from error
    if left:
        raise UserError(
            f"unexpected argument {' '.join(left)!r}; give values as --FLAG=VALUE, see --help"
        )
    return left


def _explain_config(argv: list[str], reason: str, error: Exception) -> None:
    """Raises `UserError` if the file that --config names is missing or has no variants."""
    given = [
        value for flag, _, value in (each.partition("=") for each in argv) if flag == "--config"
    ]
    path, _, variant = given[-1].partition(":") if given else ("", "", "")
    if variant and "get_config() takes 0 positional arguments" in reason:
        raise UserError(f"--config: {path} has no variants; drop `:{variant}`") from error
    if isinstance(error, OSError) and path and not os.path.exists(path):
        files = map(str, pathlib.Path(path).parent.glob("*.py"))
        near = difflib.get_close_matches(path, files, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"--config: no file {path!r}; {hint}configs/ has examples") from error


def _start(main: Callable[[], None], output: flags.FlagHolder | None) -> None:
    """Checks what all programs need, and runs `main`."""
    # Tracing makes many lasting objects; scanning them often takes 0.7 s of a chat's start.
    gc.set_threshold(10_000)
    logging.set_verbosity(logging.WARNING)  # Orbax logs every file at INFO.
    processes = _process_flags()
    if output is not None:
        _check_output(output)
    if processes is not None:
        from spectr_jax.utils import hosts

        hosts.connect(*processes)
    elif output is not None:  # With several processes, JAX's preemption service handles it.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    check_device()
    _keep_programs()
    if "import" in flags.FLAGS:
        _import_modules()
    main()


def _process_flags() -> list[Any] | None:
    """Returns the arguments of `hosts.connect`, or None for a single process."""
    if "coordinator" not in flags.FLAGS:
        return None
    found = [flags.FLAGS[name].value for name in ("coordinator", "processes", "process_id")]
    given = flags.FLAGS["distributed"].value or any(value is not None for value in found)
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


def _exit(line: str, error: BaseException, status: int = BAD_INPUT) -> NoReturn:
    """Prints `line`, after the traceback if --verbose is given, and exits."""
    # The flag may follow one that was not parsed.
    if flags.FLAGS["verbose"].value or "--verbose" in sys.argv:
        traceback.print_exception(error)
    if line:
        print(" ".join(part.strip() for part in line.splitlines()), file=sys.stderr, flush=True)
    if _process_flags() is not None:
        os._exit(status)  # The handlers of JAX wait for processes that wait for this one.
    sys.exit(status)
