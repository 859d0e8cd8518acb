"""Stops a run on Ctrl-C or SIGTERM, after a step that all processes agree on."""

import os
import signal
import time
from typing import Any

import jax
from jax.experimental import multihost_utils

# `timeout` and job systems send one signal twice: to the process and then to its group.
_ECHO_SECONDS = 1.0


class Interruption:
    """A context that records the first signal. A second one, at least a second later, interrupts
    the process at once.

    With several processes any of them may get the signal. JAX's preemption service handles
    SIGTERM, informs the others and finds the step to stop at; Ctrl-C is forwarded as SIGTERM.
    """

    def __init__(self):
        self._noted_at: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self):
        signals = [signal.SIGINT, *([signal.SIGTERM] if jax.process_count() == 1 else [])]
        self._before = {number: signal.signal(number, self._note) for number in signals}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self, step: int) -> bool:
        """Returns whether to stop after `step`, the same in every process. Each calls it once per
        step."""
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
        os.write(2, b"\nstopping after this step; interrupt again to stop now without saving\n")
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)
