"""Fills a decoder with the arrays of a checkpoint, for the readers of all formats.

Arrays have Hugging Face's layout: kernels are [outputs, inputs], and channels i and D / 2 + i of a
head are a rotary pair. Each array is stored in the model's dtype before the next is read, on one
device or in shards on a mesh.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.models import parallel
from spectr_jax.models.base import split_abstract
from spectr_jax.models.bigram import Bigram, BigramConfig
from spectr_jax.models.eagle3 import Eagle3, Eagle3Config
from spectr_jax.models.formats.tensors import Unread, check_finite, in_order, joined
from spectr_jax.models.leaves import dtype_in, named_leaves, with_leaves
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import quantize, quantized
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils import memory, sharding
from spectr_jax.utils.errors import UserError

Array = Unread | np.ndarray
DECODERS: dict[type, Any] = {
    LlamaConfig: Llama,
    Eagle3Config: Eagle3,
    TransformerConfig: Transformer,
    BigramConfig: lambda config, rngs: Bigram(config),
}
"""The model of each kind of shape."""


def fill(
    config: LlamaConfig | TransformerConfig | BigramConfig,
    arrays: Iterable[tuple[str, Array]],
    dtype: str,
    *,
    source: str,
    mesh: Mesh | None = None,
) -> Any:
    """Returns a decoder with the arrays of a checkpoint.

    Args:
      config: its shape.
      arrays: all arrays, as (our name, array).
      dtype: "float32", "bfloat16" or "int8", which quantizes each array as `quantize` does.
      source: named in errors.
      mesh: places the arrays as `parallel.on_mesh` does. This process then reads only the rows that
        its devices hold, and whole arrays where they are split by inputs. None for one device.

    Raises:
      UserError: the shape of an array is not the config's, a value is not finite, the mesh does not
        divide the decoder, or its devices have too little memory.
    """
    int8 = dtype == "int8"
    shape: Any = dataclasses.replace(config, dtype="float32" if int8 else dtype)
    laid = shape if mesh is None else parallel.laid_out(shape, mesh.shape[sharding.MODEL])

    def build(rngs):
        model = DECODERS[type(laid)](laid, rngs=rngs)
        return quantize(model) if int8 else model

    graphdef, state = split_abstract(build)
    wanted = named_leaves(state)
    for name, leaf in wanted.items():
        if not int8 and jnp.issubdtype(leaf.dtype, jnp.floating):
            wanted[name] = jax.ShapeDtypeStruct(leaf.shape, dtype_in(name, dtype))
    places = parallel.places(mesh, shape, laid, wanted) if mesh is not None else {}
    check_memory(source, wanted, mesh, places, "" if int8 else ", or dtype='int8'")
    leaves: dict[str, jax.Array] = {}
    for name, array in arrays:
        leaves |= _placed(source, name, array, wanted, places)
    if missing := sorted(wanted.keys() - leaves.keys()):
        raise UserError(f"{source!r} lacks {missing[0]}, a part of its model; fetch it again")
    return nnx.merge(graphdef, with_leaves(state, leaves))


def _placed(
    source: str, name: str, array: Array, wanted: dict, places: dict[str, parallel.Place]
) -> dict[str, jax.Array]:
    """Returns the leaves of the model for an array, on one device if there are no `places`."""
    module = name.rpartition("/")[0]
    int8 = len(array.shape) == 2 and f"{module}/scale/value" in wanted
    kernel = f"{module}/kernel/value" if int8 else f"{name}/value"
    order = places[kernel].order if kernel in places else None
    turned = name.endswith("/kernel") and not int8
    shape = array.shape[::-1] if turned else array.shape
    _check(f"{source!r}: {name}", shape, _published(wanted.get(kernel), places.get(kernel)))

    # Both leaves of an int8 array share a read, and so do devices that hold the same rows.
    @functools.cache
    def rows(start: int, stop: int) -> dict[str, np.ndarray]:
        """Returns the leaves for these rows of the array, in the order of the mesh."""
        read = in_order(array, order, start, stop)
        if not int8:
            check_finite(source, name, read)
            return {kernel: np.asarray(read.T if turned else read, wanted[kernel].dtype)}
        with np.errstate(invalid="ignore"):  # The scale of a row that is not finite is not either.
            whole, scale = quantized(read.astype(np.float32, copy=False))
        check_finite(source, name, scale)
        return {kernel: whole.astype(wanted[kernel].dtype), f"{module}/scale/value": scale[:, 0]}

    if not places:
        made = {
            leaf: jnp.asarray(part, wanted[leaf].dtype)
            for leaf, part in rows(0, array.shape[0]).items()
        }
    else:
        leaves = [kernel, f"{module}/scale/value"] if int8 else [kernel]
        made = {leaf: _sharded(wanted[leaf].shape, places[leaf], rows, leaf) for leaf in leaves}
    # Otherwise arrays stay in memory until they are copied.
    return jax.block_until_ready(made)


def _published(leaf: Any, place: parallel.Place | None) -> tuple[int, ...] | None:
    """Returns the shape of a leaf before it is laid out for a mesh; None if there is no leaf."""
    if leaf is None:
        return None
    shape = list(leaf.shape)
    if place is not None and place.order is not None:
        shape[place.outputs] = int(place.order.max()) + 1  # The order may repeat heads.
    return tuple(shape)


def _sharded(
    shape: tuple[int, ...], place: parallel.Place, rows: Callable[[int, int], dict], leaf: str
) -> jax.Array:
    """Returns a leaf of which each device of this process gets its part of `rows`."""

    def part(index: Any) -> np.ndarray:
        start, stop, _ = index[place.outputs].indices(shape[place.outputs])
        rest = list(index)
        rest[place.outputs] = slice(None)
        return rows(start, stop)[leaf][tuple(rest)]

    return jax.make_array_from_callback(shape, place.sharding, part)


def check_memory(
    source: str,
    wanted: dict[str, Any],
    mesh: Mesh | None,
    places: dict[str, parallel.Place],
    remedy: str = "",
) -> None:
    """Raises `UserError` if the weights do not fit into the memory of this process's devices.

    Args:
      source: the model, named in errors.
      wanted: abstract arrays by name.
      mesh: None for the default device.
      places: of the arrays on the mesh.
      remedy: what helps besides more devices.
    """
    each = 0
    for name, leaf in wanted.items():
        shape = places[name].sharding.shard_shape(leaf.shape) if places else leaf.shape
        each += math.prod(shape) * leaf.dtype.itemsize
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    if not devices:  # Of this process.
        return
    free, count = memory.free_of(devices), 1
    if free is None and devices[0].platform == "cpu":
        free, count = memory.free_on_host(), len(devices)
    if free is not None and (needed := each * count) > free:
        where = f"{count} devices of this host" if count > 1 else "a device"
        raise UserError(
            f"{source!r}: needs {needed / 1e9:.4g} GB on {where}, where {free / 1e9:.4g} GB are "
            f"free; use more devices (a larger mesh, or --model_parallel){remedy}"
        )


def _check(name: str, given: tuple[int, ...], expected: tuple[int, ...] | None):
    """Raises `UserError` unless an array has the `expected` shape, which is None for a part that
    the model does not have."""
    if given != expected:
        wanted = "none" if expected is None else list(expected)
        raise UserError(
            f"{name} is {list(given)} where its configuration gives {wanted}; fetch both again"
        )


def llama_arrays(
    config: LlamaConfig,
    tensor: Callable[[str], Unread],
    names: dict[str, str],
    prefix: str,
    source: str,
    first: int | None = None,
) -> Iterator[tuple[str, Unread]]:
    """Returns an iterator over the arrays of a `Llama`, for `fill`.

    Args:
      config: its shape.
      tensor: returns a tensor of the checkpoint by its name; raises KeyError if there is none.
      names: the checkpoint's names of `embed` [V, E], `norm` [E], `head` [V, E], and in each layer
        of `q`, `k`, `v`, `out`, `gate`, `up`, `down`, `norm_attention`, `norm_mlp`; if the shape
        has them, also of `q_bias`, `k_bias`, `v_bias`, `norm_q`, `norm_k`, `norm_attended`,
        `norm_down`, `layer_scale`. An embedding or head without a name is left out.
      prefix: precedes the names of a layer; `{}` stands for its index.
      source: named in errors.
      first: width of the inputs of q, k and v in the first layer; None for the config's width.

    Raises:
      UserError: a tensor is missing, or its shape is not the config's.
    """

    def read(part: str, layer: int | None = None) -> Unread:
        try:
            return tensor(("" if layer is None else prefix.format(layer)) + names[part])
        except KeyError as error:
            raise UserError(
                f"{source!r} lacks {error}, a part of its model; fetch it again"
            ) from error

    def arrays() -> Iterator[tuple[str, Unread]]:
        if "embed" in names:
            yield "embed/embedding", read("embed")
        for layer in range(config.layers):
            inputs = first if first and layer == 0 else config.width
            kind, of_layer = config.of_layer(layer), functools.partial(read, layer=layer)
            for name, array in _layer_arrays(kind, inputs, of_layer, f"{source!r}: {layer}."):
                yield f"blocks/{layer}/{name}", array
        yield "norm/scale", read("norm")
        if "head" in names and not config.tied:
            yield "head/kernel", read("head")

    # A model that claims a billion layers would be built before its arrays are read.
    read("norm_attention", config.layers - 1)
    return arrays()


def _layer_arrays(
    config: LlamaConfig, inputs: int, read: Callable[[str], Unread], place: str
) -> Iterator[tuple[str, Unread]]:
    """Returns an iterator over the arrays of a layer. `inputs` is the width of what q, k and v
    read. `place` precedes names in errors."""
    keys = config.kv_heads * config.head_width
    rows = {"q": config.heads * config.head_width, "k": keys, "v": keys}
    rows |= {"gate": config.mlp, "up": config.mlp}

    def read_all(*parts):
        """Returns parts that are one array here, after a check of their shapes."""
        arrays = [read(part) for part in parts]
        for part, array in zip(parts, arrays, strict=True):
            kind, _, bias = part.partition("_")
            width = inputs if kind in "qkv" else config.width
            expected = (rows[kind],) if bias else (rows[kind], width)
            _check(place + part, array.shape, expected)
        return joined(arrays)

    norms = ["norm_attention", "norm_mlp"]
    norms += ["norm_q", "norm_k"] if config.qk_norm else []
    norms += ["norm_attended", "norm_down"] if config.post_norms else []
    for norm in norms:
        yield f"{norm}/scale", read(norm)
    of_heads = "qk" if config.keys_as_values else "qkv"
    yield "qkv/kernel", read_all(*of_heads)
    if config.qkv_bias:
        yield "qkv/bias", read_all(*(f"{part}_bias" for part in of_heads))
    yield "out/kernel", read("out")
    yield "gate_up/kernel", read_all("gate", "up")
    yield "down/kernel", read("down")
    if config.layer_scale:
        yield "layer_scale", read("layer_scale")


def rows_in_joined(config: LlamaConfig, part: str) -> tuple[int, int, int]:
    """Returns the first row, the number of rows and that of all rows of a part that is stored
    joined: `q`, `k` or `v`, or `gate` or `up`."""
    sizes = {"q": config.heads, "k": config.kv_heads, "v": config.kv_heads}
    sizes = {name: heads * config.head_width for name, heads in sizes.items()}
    if part not in sizes:
        sizes = {"gate": config.mlp, "up": config.mlp}
    before = [*sizes].index(part)
    return sum([*sizes.values()][:before]), sizes[part], sum(sizes.values())


def with_rest_in_halves(rows: np.ndarray, head_width: int, rotated: int) -> np.ndarray:
    """Returns the rows of heads with the channels that are not rotated at the end of each half."""
    halves = np.arange(rotated).reshape(2, -1), np.arange(rotated, head_width).reshape(2, -1)
    order = np.concatenate(halves, axis=1).ravel()
    return rows.reshape(-1, head_width, *rows.shape[1:])[:, order].reshape(rows.shape)
