"""A Llama filled part by part: what the readers of its checkpoints share.

Parts have Hugging Face's order: kernels are [outputs, inputs], and rotary pairs are a channel of
the first half of a head and the same one of the second. Each goes into its place, in the model's
dtype, before the next is read.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import quantize, quantized
from spectr_jax.models.weights import named_leaves, with_leaves
from spectr_jax.utils.errors import UserError

Part = Callable[[str], np.ndarray]
"""Reads a part by its name below, a part of a layer as `LAYER.NAME`; raises KeyError where there is
none."""


def fill(config: LlamaConfig, part: Part, *, int8: bool, source: str) -> Llama:
    """Returns a decoder of this shape with the parts of a checkpoint.

    Args:
      config: its shape and dtype.
      part: reads `embed` [V, E], `norm` [E], `head` [V, E] and in each layer `q`, `k`, `v`, `out`,
        `gate`, `up`, `down`, `norm_attention`, `norm_mlp`; where the shape has them `q_bias`,
        `k_bias`, `v_bias`, `norm_q`, `norm_k`.
      int8: with int8 products, as by `quantize`, without a float32 model in memory first; needs a
        config of float32.
      source: named in errors.

    Raises:
      UserError: a part is missing, or of another shape than the config's.
    """

    def build():
        model = Llama(config, rngs=nnx.Rngs(0))
        return quantize(model) if int8 else model

    graphdef, state = nnx.split(nnx.eval_shape(build))
    wanted, leaves = named_leaves(state), {}
    for name, array in _named(config, part, source):
        for leaf, value in _leaves(name, array, wanted):
            _check(source, name, value, wanted[leaf].shape if leaf in wanted else None)
            made = jnp.asarray(value, wanted[leaf].dtype if int8 else config.dtype)
            leaves[leaf] = jax.block_until_ready(
                made
            )  # Else copies are made later, and parts wait for them in memory.
    return nnx.merge(graphdef, with_leaves(state, leaves))


def _check(source: str, name: str, array, expected: tuple[int, ...] | None) -> None:
    """Raises `UserError` for an array of another shape than the configuration's, which may have no
    such part."""
    if array.shape != expected:
        given = "none" if expected is None else list(expected)
        raise UserError(
            f"{source!r}: {name} is {list(array.shape)} where its configuration gives {given}; "
            "fetch both again"
        )


def _leaves(
    name: str, array: np.ndarray, wanted: dict
) -> Iterator[tuple[str, jax.Array | np.ndarray]]:
    """The leaves of the model that an array is: itself, or an int8 kernel and its scales."""
    module = name.rpartition("/")[0]
    kernel = f"{module}/kernel/value"
    if array.ndim == 2 and f"{module}/scale/value" in wanted:
        whole, scale = jax.jit(quantized)(jnp.asarray(array, jnp.float32))
        yield kernel, whole
        yield f"{module}/scale/value", scale[:, 0]
    elif name.endswith("/kernel"):
        yield f"{name}/value", array.T
    else:
        yield f"{name}/value", array


def _named(config: LlamaConfig, part: Part, source: str) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays of our decoder by their names, one at a time."""

    def read(name):
        try:
            return part(name)
        except KeyError as error:
            raise UserError(
                f"{source!r} lacks {error}, a part of its model; fetch it again"
            ) from error

    rows = {
        "q": config.heads * config.head_width,
        **dict.fromkeys("kv", config.kv_heads * config.head_width),
    }
    rows |= {
        **{f"{name}_bias": count for name, count in rows.items()},
        "gate": config.mlp,
        "up": config.mlp,
    }

    def joined(layer, *names):
        """Parts that are one array here, each of its own shape."""
        arrays = [read(f"{layer}.{name}") for name in names]
        for name, array in zip(names, arrays, strict=True):
            expected = (rows[name],) if name.endswith("_bias") else (rows[name], config.width)
            _check(source, f"{layer}.{name}", array, expected)
        return np.concatenate(arrays)

    yield "embed/embedding", read("embed")
    for layer in range(config.layers):
        prefix = f"blocks/{layer}"
        for norm in (
            "norm_attention",
            "norm_mlp",
            *(("norm_q", "norm_k") if config.qk_norm else ()),
        ):
            yield f"{prefix}/{norm}/scale", read(f"{layer}.{norm}")
        yield f"{prefix}/qkv/kernel", joined(layer, *"qkv")
        if config.qkv_bias:
            yield f"{prefix}/qkv/bias", joined(layer, "q_bias", "k_bias", "v_bias")
        yield f"{prefix}/out/kernel", read(f"{layer}.out")
        yield f"{prefix}/gate_up/kernel", joined(layer, "gate", "up")
        yield f"{prefix}/down/kernel", read(f"{layer}.down")
    yield "norm/scale", read("norm")
    if not config.tied:
        yield "head/kernel", read("head")
