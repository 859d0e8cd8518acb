"""Shared by all tests: strict JAX, and counting of compilations."""

import contextlib
import gc
import os

# Most of the tests' time is compilation. Set before JAX is imported.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
# Entry points that tests start leave nothing in the user's cache folder.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

import jax
import pytest

jax.config.update("jax_debug_key_reuse", True)

_COMPILATION = "/jax/core/compile/backend_compile_duration"


_TESTS_BETWEEN_CLEARANCES = 100
_tests_done = 0


@pytest.fixture(autouse=True)
def _programs_are_freed():
    """Each program that XLA compiles for the CPU maps memory, and Linux lets a process have 65,530 maps."""
    yield
    global _tests_done
    _tests_done += 1
    if _tests_done % _TESTS_BETWEEN_CLEARANCES == 0:
        jax.clear_caches()
        gc.collect()


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
