"""Ctrl-C and SIGTERM: the run stops after a step that all processes agree on, and saves."""

import os
import signal
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A signal within this time is not a second request: `timeout` and job systems send the same one to
# the process and then to its group.
_ECHO_SECONDS = 1.0


class Interruption:
    """A context that records the first signal. A second one, at least a second later, ends the
    process at once.

    With several processes any of them may get the signal. JAX's preemption service handles
    SIGTERM, informs the others and finds the step to stop at; Ctrl-C is forwarded as SIGTERM.
    """

    def __init__(self):
        self._noted_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self):
        alone = jax.process_count() == 1
        self._before = {
            number: signal.signal(number, self._note) for number in _SIGNALS[: None if alone else 1]
        }
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`. Every process calls it once per step and gets
        the same answer."""
        if jax.process_count() == 1:
            return self._noted_at is not None
        return multihost_utils.reached_preemption_sync_point(step)

    def _note(self, number, frame):
        now = time.monotonic()
        if self._noted_at is not None:
            if now - self._noted_at < _ECHO_SECONDS:
                return
            raise KeyboardInterrupt
        self._noted_at = now
        os.write(2, b"\nstopping after this step; once more to stop at once, without saving\n")
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
