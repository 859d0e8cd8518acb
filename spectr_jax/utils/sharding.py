"""The device mesh, with axes `data`, `fsdp` and `model`, and the placement of arrays on it."""

import numbers
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spectr_jax.utils.errors import UserError

MODEL = "model"
AXES = ("data", "fsdp", MODEL)
ROWS = PartitionSpec(AXES[:2])
"""Splits the rows of a batch."""


def make_mesh(fsdp: int = 1, model: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a (data, fsdp, model) mesh of all devices or of those given.

    Rows of a batch are spread over `data` and `fsdp`. Each group of `model` devices computes the
    same rows with one copy of the weights (`models.parallel`). In training, each group of `fsdp`
    devices shares one copy of the parameters.

    Raises:
      UserError: `fsdp` or `model` does not divide the number of devices.
    """
    count = len(devices or jax.devices())
    for name, value in (("mesh.fsdp", fsdp), ("model", model)):
        if not isinstance(value, numbers.Integral) or value < 1 or count % value:
            raise UserError(f"{name}={value!r}: must divide the {count} devices; choose a divisor")
        count //= int(value)
    return jax.make_mesh(
        (count, fsdp, model), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def check_mesh(mesh: Any) -> None:
    """Raises `UserError` unless `mesh` is one that `make_mesh` returns."""
    hint = "give one from `sharding.make_mesh`"
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh={mesh!r:.60}: must be a mesh or None; {hint}")
    if mesh.axis_names != AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise UserError(f"mesh: has axes {mesh.axis_names} of types {mesh.axis_types}; {hint}")


def groups_of(mesh: Mesh) -> int:
    """Returns the number of groups of devices that compute different rows."""
    return mesh.size // mesh.shape[MODEL]


def model_devices() -> int:
    """Returns the size of the axis `model` in a program that `request.over_mesh` traces, else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    # A mesh of the user's own `jax.set_mesh` has no manual axes.
    ours = mesh.axis_names == AXES and mesh.axis_types[0] == AxisType.Manual
    return mesh.shape[MODEL] if ours else 1


def over_groups(x: jax.Array) -> jax.Array:
    """Returns the maximum of `x` over all groups of devices, if they must take the same steps.

    The compiler's collectives over the axis `model` may involve the devices of all groups. Without
    that axis, each device loops as often as its own sequences need, and `x` is returned.
    """
    return x if model_devices() == 1 else jax.lax.pmax(x, AXES[:2])


def shards_of(size: int) -> int:
    """Returns the number of parts in which `split` splits an axis of a size."""
    devices = model_devices()
    return 1 if size % devices else devices


def split(x: jax.Array, axis: int) -> jax.Array:
    """Returns `x` with `axis` split over the mesh's axis `model`, in a program for such a mesh.

    Elsewhere, or if the number of devices does not divide the axis, it returns `x` itself.
    """
    if shards_of(x.shape[axis]) == 1:
        return x
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[axis] = MODEL
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def whole(tree: Any) -> Any:
    """Returns arrays that each device of the mesh's axis `model` has whole, in such a program.

    Without it, the compiler may split small arrays too, and exchange them between steps.
    """
    if model_devices() == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


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
