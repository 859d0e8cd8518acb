"""Shared by all tests: strict JAX, and counting of compilations."""

import contextlib

import jax
import pytest

jax.config.update("jax_debug_key_reuse", True)

_COMPILATION = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def count_compilations():
    """A context manager that yields a list with one entry for each program compiled within."""

    @contextlib.contextmanager
    def count():
        compiled: list[str] = []

        def listen(event, duration, **_):
            if event == _COMPILATION:
                compiled.append(event)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield compiled
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)

    return count
