"""Compiles in parallel: a table on an accelerator has about 100 programs that take 30 s each."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

CORES_OF_A_PROGRAM = {"cpu": 4}
"""Cores that XLA uses to compile one program, by backend; 1 by default."""


def side_by_side(tasks: Sequence[Callable[[], Any]]) -> Iterator[Any]:
    """Yields the results of the tasks, in order. The number of cores limits how many run at once.

    With several processes one task runs at a time, because all processes must run them in the same
    order.
    """
    cores = (os.cpu_count() or 1) // CORES_OF_A_PROGRAM.get(jax.default_backend(), 1)
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else max(1, cores)) as pool:
        yield from pool.map(lambda task: task(), tasks)
