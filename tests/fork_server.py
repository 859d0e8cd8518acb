"""Runs programs in processes forked from one that has imported JAX: a start takes milliseconds, not
seconds.

    python tests/fork_server.py MODULE...

imports the modules, none of which may start a JAX backend, and reads requests from stdin, a line of
JSON each: a program (a module as for `python -m`, or a .py file), its arguments, environment
variables, and the files that get its output. For each it prints the program's exit status. It ends
with its stdin.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import traceback

SECONDS = 60
"""The most that a program may take."""


def become(
    program: str, arguments: list[str], environment: dict[str, str], stdout: str, stderr: str
) -> None:
    """Runs the program in this process, which ends as the program does, without the half second
    that Python takes to end."""
    signal.alarm(SECONDS)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job ignores it.
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [program, *arguments]
    status = 0
    try:
        if program.endswith(".py"):
            sys.path.insert(0, os.path.dirname(program))  # As `python PROGRAM` has it.
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
