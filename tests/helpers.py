"""What several files of tests share, besides the fixtures of `conftest.py`."""

import functools
import pathlib
import runpy
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
