"""The device mesh, with axes `data` and `fsdp`, and the placement of arrays on it."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spectr_jax.utils.errors import UserError

AXES = ("data", "fsdp")
ROWS = PartitionSpec(AXES)
"""Splits the rows of a batch over all devices."""


def make_mesh(fsdp: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a (data, fsdp) mesh of all devices or of those given. Each group of `fsdp` devices
    shares one copy of the parameters. Raises `UserError` if `fsdp` does not divide the devices."""
    count = len(devices or jax.devices())
    if fsdp < 1 or count % fsdp:
        raise UserError(f"mesh.fsdp={fsdp}: must divide the {count} devices; choose a divisor")
    return jax.make_mesh(
        (count // fsdp, fsdp), AXES, axis_types=(AxisType.Auto,) * 2, devices=devices
    )


def state_sharding(mesh: Mesh, abstract: Any) -> Any:
    """Returns the sharding of parameters and optimizer state. Each array is split along the largest
    axis that `fsdp` divides, if any, and otherwise replicated."""
    fsdp = mesh.shape["fsdp"]

    def rule(leaf):
        axes: list[str | None] = [None] * len(leaf.shape)
        divisible = [axis for axis, size in enumerate(leaf.shape) if size and size % fsdp == 0]
        if fsdp > 1 and divisible:
            axes[max(divisible, key=lambda axis: leaf.shape[axis])] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(rule, abstract)


def put_rows(mesh: Mesh, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    """Returns this process's rows of a batch as arrays of the whole mesh."""
    place = NamedSharding(mesh, ROWS)
    return {
        name: jax.make_array_from_process_local_data(place, rows) for name, rows in batch.items()
    }


def replicate(mesh: Mesh, tree: Any) -> Any:
    """Returns arrays that every process holds, replicated on every device of the mesh."""
    return put(tree, jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), tree))


def put(tree: Any, places: Any) -> Any:
    """Returns arrays that every process holds, each placed by its sharding in `places`."""

    def put_one(leaf, place):
        if jax.process_count() == 1 or leaf.sharding == place:
            return jax.device_put(leaf, place)
        # A device of one process cannot always send to a device of another.
        on_host = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, place, lambda index: on_host[index])

    return jax.tree.map(put_one, tree, places)
