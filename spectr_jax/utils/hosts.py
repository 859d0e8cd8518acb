"""One run on several processes: how they connect and exchange small values."""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from spectr_jax.utils.errors import UserError, first_line

HEARTBEAT_SECONDS = 30
"""Time after which the other processes exit if one stops responding."""


def connect(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Connects this process, of index `process`, to the others. Call it before JAX is used.

    `coordinator` is HOST:PORT of process 0. Without arguments, all three values come from the
    environment (TPU pods, Slurm, Open MPI).

    Raises:
      UserError: the values are inconsistent, the environment has none, or no process answers.
    """
    given = {"coordinator": coordinator, "processes": processes, "process_id": process}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise UserError(
            f"--{missing[0]} is missing; give --coordinator, --processes and --process_id "
            "together, or none"
        )
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise UserError(
            f"--coordinator={coordinator!r}: must be process 0's HOST:PORT, such as host0:1234"
        )
    if processes is not None and process is not None and not 0 <= process < processes:
        raise UserError(
            f"--process_id={process}: must be in 0..{processes - 1}; each of "
            f"--processes={processes} processes needs its own"
        )
    where = f"at {coordinator}" if coordinator else "in the environment (TPU pod, Slurm, Open MPI)"
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"no other processes were found {where} ({first_line(error)}); start all of them, with "
            "--coordinator, --processes and --process_id if the environment does not set these"
        ) from error


def is_first() -> bool:
    """Returns whether this process writes files and prints."""
    return jax.process_index() == 0


def own_share(count: int) -> slice:
    """Returns this process's slice of `count` evenly split items, such as rows of a batch."""
    share = count // jax.process_count()
    return slice(jax.process_index() * share, (jax.process_index() + 1) * share)


def gather(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, in order. Every process must call it."""
    if jax.process_count() == 1:
        return [value]
    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(content)))
    # JSON may end in spaces.
    padded = np.pad(content, (0, int(sizes.max()) - len(content)), constant_values=ord(" "))
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(np.asarray(row).tobytes()) for row in rows]


def wait_for_all(what: str) -> None:
    """Waits until all processes have called it with the same name `what`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def fetch(tree: Any) -> Any:
    """Returns a pytree of NumPy arrays, gathered from all devices. Every process must call it."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)
