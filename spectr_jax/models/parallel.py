"""Tensor parallelism: the weights of a decoder, split over the axis `model` of a mesh.

The layout is Megatron's (Shoeybi et al., 2019, arXiv 1909.08053). Matrices that read the hidden
state (queries, keys and values; gate and up; the head) are split by their outputs, the embedding by
its tokens, and those that write the hidden state (out, down) by their inputs, so that a block needs
two all-reduces. Norms and sinusoidal or learned positions are on every device.

Queries, keys and values are one matrix here, and so are gate and up. `laid_out` orders their outputs
by device: each has whole heads of queries with the keys and values that they read. If there are more
devices than key and value heads, these heads are repeated. A cache is split by its heads, and
logits by their tokens (`utils.sharding.split`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from spectr_jax.models.base import Decoder
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.leaves import named_leaves, with_leaves
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError

SPLIT = 2**28
"""A draft of fewer bytes is not split: reading it takes less time than its layers' all-reduces."""

BY_OUTPUT, BY_INPUT = ("embed", "qkv", "gate_up", "up", "head"), ("out", "down")
"""The modules whose arrays are split, by name. Heads over fewer tokens have other modules."""


class Place(NamedTuple):
    """Where an array of a decoder lies on a mesh.

    Attributes:
      sharding: its sharding.
      outputs: the axis of its outputs; of the tokens of an embedding.
      order: the outputs of the published array in their order on the mesh; None for their own.
    """

    sharding: NamedSharding
    outputs: int
    order: Int[np.ndarray, " outputs"] | None


class Misfit(UserError):
    """A decoder cannot be split over a number of devices."""


def laid_out(config: Any, devices: int) -> Any:
    """Returns the config of the same decoder with its joined matrices ordered for `devices`.

    Key and value heads are repeated if there are fewer than `devices`.

    Raises:
      Misfit: `devices` does not divide the heads, the MLP or the vocabulary, or neither of
        `devices` and the number of key and value heads divides the other.
      UserError: the decoder is ordered for another number of devices.
    """
    if config.shards == devices:
        return config
    if config.shards > 1:
        raise UserError(
            f"model={devices}: the decoder is split for model={config.shards}; load it again with "
            "this mesh"
        )
    kept = {"shards": devices}
    sizes = {"heads": config.heads, "mlp": config.mlp, "vocab_size": config.vocab_size}
    for name in ("kv_heads", "full_kv_heads"):
        count = getattr(config, name, 0)
        if 0 < count < devices and devices % count == 0:
            kept[name] = devices  # A Transformer has as many as heads, and is refused below.
        sizes[name] = kept.get(name, count)
    for name, size in sizes.items():
        if size % devices:
            choose = "choose another number of devices, of make_mesh or --model_parallel"
            raise Misfit(f"model={devices}: must divide {name}={size}; {choose}")
    return dataclasses.replace(config, **kept)


def order(config: Any, wanted: Any, name: str) -> Int[np.ndarray, " outputs"] | None:
    """Returns the outputs of a joined matrix in the order of `wanted`; None for other arrays.

    `config` is that of the decoder as published, with `shards=1`; `wanted` is its `laid_out`.
    `name` is one of `leaves.named_leaves`.
    """
    module = module_of(name)
    if module == "qkv":
        layer = int(name.split("/")[1])  # Of blocks/LAYER/qkv.
        config, wanted = config.of_layer(layer), wanted.of_layer(layer)
        each, D = wanted.kv_heads // config.kv_heads, config.head_width
        keys = config.heads * D + np.arange(config.kv_heads * D).reshape(-1, D)
        keys = np.repeat(keys, each, axis=0).ravel()
        parts = [np.arange(config.heads * D), keys]
        if not getattr(config, "keys_as_values", False):
            parts.append(keys + config.kv_heads * D)
    elif module == "gate_up":
        parts = [np.arange(config.mlp), config.mlp + np.arange(config.mlp)]
    else:
        return None
    return np.concatenate([part.reshape(wanted.shards, -1) for part in parts], axis=1).ravel()


def specs(leaves: dict[str, Any]) -> dict[str, PartitionSpec]:
    """Returns how the arrays of a decoder are split, by the names of `leaves.named_leaves`."""
    found = {}
    axes: list[str | None]
    for name, leaf in leaves.items():
        module, axes, outputs = module_of(name), [None] * len(leaf.shape), outputs_of(name, leaves)
        if module in BY_OUTPUT and not name.endswith("/tokens/value"):  # Of a `PartialHead`.
            axes[outputs] = sharding.MODEL
        elif module in BY_INPUT and name.endswith("/kernel/value"):
            axes[1 - outputs] = sharding.MODEL
        found[name] = PartitionSpec(*axes)
    return found


def outputs_of(name: str, leaves: dict[str, Any]) -> int:
    """Returns the axis of a leaf's outputs: a kernel is [inputs, outputs], in int8 the reverse."""
    path, _, field = name.removesuffix("/value").rpartition("/")
    return int(field == "kernel" and f"{path}/scale/value" not in leaves)


def places(mesh: Mesh, config: Any, wanted: Any, leaves: dict[str, Any]) -> dict[str, Place]:
    """Returns where the arrays of a decoder lie on a mesh, by the names of `leaves.named_leaves`.

    Args:
      mesh: from `sharding.make_mesh`.
      config: of the decoder as it is.
      wanted: its `laid_out`.
      leaves: arrays, or abstract arrays, by name.
    """
    found = {}
    for name, spec in specs(leaves).items():
        index = None if config == wanted else order(config, wanted, name)
        found[name] = Place(NamedSharding(mesh, spec), outputs_of(name, leaves), index)
    return found


def module_of(name: str) -> str:
    """Returns the module of a leaf, such as `qkv` for `blocks/0/qkv/kernel/value`, or ""."""
    return name.removesuffix("/value").rpartition("/")[0].rpartition("/")[2]


def on_mesh(mesh: Mesh, model: Any) -> Frozen:
    """Returns a model with its arrays on a mesh, for `generate`.

    A decoder is split over the axis `model`. Arrays of other models that already lie on this mesh
    stay as they are, so that a model of your own can be split as you like; all others are
    replicated.

    Args:
      mesh: from `sharding.make_mesh`.
      model: as for `freeze`.

    Raises:
      UserError: as `freeze` and `laid_out`.
    """
    sharding.check_mesh(mesh)
    frozen, devices = freeze(model), mesh.shape[sharding.MODEL]
    if _is_split(mesh, frozen):
        return frozen
    decoder: Any = frozen.merge()
    if not isinstance(decoder, Decoder):
        return _replicated(mesh, frozen)
    config, wanted = decoder.config, laid_out(decoder.config, devices)
    if devices == 1:
        return _replicated(mesh, frozen)
    decoder.config = wanted
    for layer, block in enumerate(decoder.blocks):
        block.config = wanted.of_layer(layer)
    graphdef, state = nnx.split(decoder)
    leaves = named_leaves(state)
    arrays = {}
    for name, place in places(mesh, config, wanted, leaves).items():
        array = leaves[name]
        if place.order is not None:
            array = jnp.take(array, place.order, axis=place.outputs)
        arrays[name] = sharding.put(array, place.sharding)
    return freeze(nnx.merge(graphdef, with_leaves(state, arrays)))


def draft_on_mesh(mesh: Mesh, model: Any) -> Frozen:
    """Returns `on_mesh`, but a small decoder, or one whose axes do not fit, is replicated.

    Raises:
      UserError: as `freeze`.
    """
    frozen = freeze(model)
    if all(_lies_on(mesh, leaf) for leaf in frozen.leaves):
        return frozen
    decoder, summed = frozen.merge(), sum(getattr(leaf, "nbytes", 0) for leaf in frozen.leaves)
    if isinstance(decoder, Decoder) and summed < SPLIT and decoder.config.shards == 1:
        return _replicated(mesh, frozen)
    try:
        return on_mesh(mesh, frozen)
    except Misfit:
        return _replicated(mesh, frozen)


def pair_on_mesh(mesh: Mesh, target: Frozen, draft: Frozen | None) -> tuple[Frozen, Frozen | None]:
    """Returns a target by `on_mesh`, and its draft, if there is one, by `draft_on_mesh`."""
    return on_mesh(mesh, target), None if draft is None else draft_on_mesh(mesh, draft)


def _replicated(mesh: Mesh, frozen: Frozen) -> Frozen:
    """Returns a model with its arrays on a mesh: replicated, unless they lie on the mesh already."""
    whole = NamedSharding(mesh, PartitionSpec())
    kept = [leaf.sharding if _lies_on(mesh, leaf) else whole for leaf in frozen.leaves]
    return dataclasses.replace(frozen, leaves=sharding.put(frozen.leaves, kept))


def _is_split(mesh: Mesh, frozen: Frozen) -> bool:
    """Returns whether all arrays lie on the mesh, and some are split if it has several devices."""
    return all(_lies_on(mesh, leaf) for leaf in frozen.leaves) and (
        mesh.shape[sharding.MODEL] == 1
        or any(not leaf.sharding.is_fully_replicated for leaf in frozen.leaves)
    )


def _lies_on(mesh: Mesh, leaf: Any) -> bool:
    place = getattr(leaf, "sharding", None)
    return isinstance(place, NamedSharding) and place.mesh == mesh
