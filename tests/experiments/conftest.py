"""Shared by the tests of the tables."""

import pytest


@pytest.fixture
def stopping():
    """Returns a function that wraps another one. The wrapped function appends the arguments of each
    call to `calls`, and its calls whose numbers are in `at` stop the run."""

    def stopping(function, calls, *at):
        def wrapped(*args, **kwargs):
            calls.append(args)
            if len(calls) in at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return wrapped

    return stopping
