"""Defines the fixture with which tests stop a run, to test that it resumes."""

import pytest


@pytest.fixture
def stopping():
    """Returns a function that wraps another function. The wrapped function appends the arguments of
    each call to `calls`. It stops the run at the calls whose numbers, counted from 1, are in `at`.
    """

    def stopping(function, calls, *at):
        def wrapped(*args, **kwargs):
            calls.append(args)
            if len(calls) in at:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return wrapped

    return stopping
