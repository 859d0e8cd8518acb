"""Fills a decoder with the arrays of a checkpoint, for the readers of all formats.

Arrays have Hugging Face's layout: kernels are [outputs, inputs], and channels i and D / 2 + i of a
head are a rotary pair. Each array is stored in the model's dtype before the next is read.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models.base import split_abstract
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import quantize, quantized
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.models.weights import check_finite, named_leaves, with_leaves
from spectr_jax.utils.errors import UserError


def fill(
    config: LlamaConfig | TransformerConfig,
    arrays: Iterable[tuple[str, np.ndarray]],
    dtype: str,
    *,
    source: str,
) -> Any:
    """Returns a decoder with the arrays of a checkpoint.

    Args:
      config: its shape.
      arrays: all arrays, as (our name, array).
      dtype: "float32", "bfloat16" or "int8", which quantizes each array as `quantize` does.
      source: named in errors.

    Raises:
      UserError: the shape of an array is not the config's, or a value is not finite.
    """
    int8 = dtype == "int8"
    shape = dataclasses.replace(config, dtype="float32" if int8 else dtype)

    def build(rngs):
        decoder: Any = Llama if isinstance(shape, LlamaConfig) else Transformer
        model = decoder(shape, rngs=rngs)
        return quantize(model) if int8 else model

    graphdef, state = split_abstract(build)
    wanted, leaves = named_leaves(state), {}
    for name, array in arrays:
        for leaf, value in _leaves(name, array, wanted):
            _check(source, name, value, wanted[leaf].shape if leaf in wanted else None)
            check_finite(source, name, value)
            made = jnp.asarray(value, wanted[leaf].dtype if int8 else dtype)
            # Otherwise arrays stay in memory until they are copied.
            leaves[leaf] = jax.block_until_ready(made)
    return nnx.merge(graphdef, with_leaves(state, leaves))


def _check(source: str, name: str, array, expected: tuple[int, ...] | None) -> None:
    """Raises `UserError` unless `array` has the `expected` shape; None if there is no such part."""
    if array.shape != expected:
        given = "none" if expected is None else list(expected)
        raise UserError(
            f"{source!r}: {name} is {list(array.shape)} where its configuration gives {given}; "
            "fetch both again"
        )


def _leaves(name: str, array: np.ndarray, wanted: dict) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of the model for an array: itself, or an int8 kernel and its scales."""
    module = name.rpartition("/")[0]
    if array.ndim == 2 and f"{module}/scale/value" in wanted:
        with np.errstate(invalid="ignore"):  # The scale of a row that is not finite is not either.
            whole, scale = quantized(array.astype(np.float32, copy=False))
        yield f"{module}/kernel/value", whole
        yield f"{module}/scale/value", scale[:, 0]
    else:
        yield f"{name}/value", array.T if name.endswith("/kernel") else array


def llama_arrays(
    config: LlamaConfig,
    tensor: Callable[[str], np.ndarray],
    names: dict[str, str],
    prefix: str,
    source: str,
) -> Iterator[tuple[str, np.ndarray]]:
    """Returns an iterator over the arrays of a `Llama`, for `fill`.

    Args:
      config: its shape.
      tensor: reads a tensor of the checkpoint by its name; raises KeyError if there is none.
      names: the checkpoint's names of `embed` [V, E], `norm` [E], `head` [V, E], and in each layer
        of `q`, `k`, `v`, `out`, `gate`, `up`, `down`, `norm_attention`, `norm_mlp`; if the shape
        has them, also of `q_bias`, `k_bias`, `v_bias`, `norm_q`, `norm_k`.
      prefix: precedes the names of a layer; `{}` stands for its index.
      source: named in errors.

    Raises:
      UserError: a tensor is missing, or its shape is not the config's.
    """

    def read(part, layer=None):
        try:
            return tensor(("" if layer is None else prefix.format(layer)) + names[part])
        except KeyError as error:
            raise UserError(
                f"{source!r} lacks {error}, a part of its model; fetch it again"
            ) from error

    keys = config.kv_heads * config.head_width
    rows = {"q": config.heads * config.head_width, "k": keys, "v": keys}
    rows |= {f"{name}_bias": count for name, count in rows.items()}
    rows |= {"gate": config.mlp, "up": config.mlp}

    def joined(layer, *parts):
        """Returns parts that are one array here, after a check of their shapes."""
        arrays = [read(part, layer) for part in parts]
        for part, array in zip(parts, arrays, strict=True):
            expected = (rows[part],) if part.endswith("_bias") else (rows[part], config.width)
            _check(source, f"{layer}.{part}", array, expected)
        return np.concatenate(arrays)

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        norms = ("norm_attention", "norm_mlp", *(("norm_q", "norm_k") if config.qk_norm else ()))
        yield "embed/embedding", read("embed")
        for layer in range(config.layers):
            block = f"blocks/{layer}"
            for norm in norms:
                yield f"{block}/{norm}/scale", read(norm, layer)
            yield f"{block}/qkv/kernel", joined(layer, *"qkv")
            if config.qkv_bias:
                yield f"{block}/qkv/bias", joined(layer, "q_bias", "k_bias", "v_bias")
            yield f"{block}/out/kernel", read("out", layer)
            yield f"{block}/gate_up/kernel", joined(layer, "gate", "up")
            yield f"{block}/down/kernel", read("down", layer)
        yield "norm/scale", read("norm")
        if not config.tied:
            yield "head/kernel", read("head")

    # A model that claims a billion layers would be built before its arrays are read.
    read("norm_attention", config.layers - 1)
    return arrays()
