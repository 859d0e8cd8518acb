"""Runs programs in processes forked from one that has already imported JAX.

A program then starts in milliseconds instead of seconds. The command

    python tests/fork_server.py MODULE...

imports the modules, none of which may start a JAX backend. It reads requests from stdin, one line
of JSON each: a program (a module as for `python -m`, or a .py file), its arguments, environment
variables, and the files for its stdout and stderr. For each request it prints the program's exit
status. It exits when its stdin closes.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback

SECONDS = 60
"""The time limit of a program."""


def become(
    program: str, arguments: list[str], environment: dict[str, str], stdout: str, stderr: str
) -> None:
    """Runs the program in this process and exits with its status. `os._exit` saves the half second
    of Python's shutdown."""
    signal.alarm(SECONDS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Background jobs ignore SIGINT.
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [program, *arguments]
    status = 0
    try:
        if program.endswith(".py"):
            sys.path.insert(0, os.path.dirname(program))  # `python PROGRAM` does so too.
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
