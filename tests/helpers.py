"""What several files of tests share, besides the fixtures of `conftest.py`."""

import functools
import json
import os
import pathlib
import runpy
import socket
import subprocess
import sys
import types

ROOT = pathlib.Path(__file__).parents[1]
REFERENCES = ROOT / "tests" / "references"


@functools.cache
def names_in(path: str) -> types.SimpleNamespace:
    """Returns the names of a Python file of the repository, such as a config or a script."""
    return types.SimpleNamespace(**runpy.run_path(str(ROOT / path)))


def stopping(function, calls, *at):
    """Returns `function` so that it appends the arguments of each call to `calls`, and stops the run
    at the calls whose numbers, counted from 1, are in `at`."""

    def wrapped(*args, **kwargs):
        calls.append(args)
        if len(calls) in at:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return wrapped


def virtual_devices(count):
    """Returns the environment of a process that sees `count` devices of a CPU."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    return {**os.environ, "XLA_FLAGS": flags}


def started(devices, *command):
    """Returns a Python program that has started on some virtual devices."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], env=virtual_devices(devices), **streams)


def answers(*programs):
    """Returns the JSON in the last line that each program prints, when all have ended."""
    outputs = [program.communicate() for program in programs]
    assert not any(program.returncode for program in programs), outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
