"""Compiles several programs at once: a table on an accelerator has a hundred of them, half a minute each."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

CORES_OF_A_PROGRAM = {"cpu": 4}
"""Cores that XLA uses to compile one program, by backend; 1 for all others."""


def side_by_side(tasks: Sequence[Callable[[], Any]]) -> Iterator[Any]:
    """The results of the tasks, in order; as many run at once as there are cores to compile them.

    Several processes must run the same in the same order: there, one at a time.
    """
    cores = (os.cpu_count() or 1) // CORES_OF_A_PROGRAM.get(jax.default_backend(), 1)
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else max(1, cores)) as pool:
        yield from pool.map(lambda task: task(), tasks)
