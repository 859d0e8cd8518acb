"""Several programs in the compiler at once: a table on an accelerator has a hundred of them, of half a minute each."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

CORES_OF_A_PROGRAM = {"cpu": 4}
"""That XLA keeps busy with one program, by backend; one on all others."""


def side_by_side(tasks: Sequence[Callable[[], Any]]) -> Iterator[Any]:
    """What the tasks return, in order; as many run at once as there are cores for their compilations.

    Several processes must run the same in the same order: there, one at a time.
    """
    cores = (os.cpu_count() or 1) // CORES_OF_A_PROGRAM.get(jax.default_backend(), 1)
    with ThreadPoolExecutor(1 if jax.process_count() > 1 else max(1, cores)) as pool:
        yield from pool.map(lambda task: task(), tasks)
