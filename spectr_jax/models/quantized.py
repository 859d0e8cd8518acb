"""Eight-bit weights for decoding: a call reads a quarter of the bytes.

Weights have a scale for each output; activations and sums are float32 (the CPU kernels round
activations to 16 bits: `layers.cpu`). The output of every method follows the distribution of the
quantized model exactly; `configs/quality.py` measures its distance from the original model.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models.base import Decoder
from spectr_jax.models.layers import cpu
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError

LARGEST = 127
ROWS = 64
"""NumPy quantizes this many rows at a time, which fit into a core's cache."""
AnyDecoder = TypeVar("AnyDecoder", bound=Decoder)


class Int8Linear(nnx.Module):
    """A linear layer with an int8 kernel [outputs, inputs] and a scale for each output."""

    def __init__(self, linear: nnx.Linear):
        bias = linear.bias
        self.kernel, self.scale = _parameters(_on_host(linear.kernel[...]).T)
        self.bias = None if bias is None else nnx.Param(jnp.asarray(bias[...], jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns float32 [..., outputs] of float32 [..., inputs]."""
        result = _product(x, self.kernel[...], self.scale[...])
        return result if self.bias is None else result + self.bias[...]


class Int8Embed(nnx.Module):
    """An embedding that is the head too: int8 rows [V, E] with a scale for each token."""

    def __init__(self, embed: nnx.Embed):
        self.kernel, self.scale = _parameters(_on_host(embed.embedding[...]))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns float32 [..., E] of tokens [...]."""
        return self.kernel[...][tokens].astype(jnp.float32) * self.scale[...][tokens][..., None]

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns logits [..., V] of float32 [..., E]."""
        return _product(x, self.kernel[...], self.scale[...])


def _on_host(x: jax.Array) -> Any:
    """Returns an array of a CPU as NumPy's: XLA would compile eight programs for each shape."""
    return np.asarray(x) if backend.on_cpu() and not isinstance(x, jax.core.Tracer) else x


def _parameters(rows: Any) -> tuple[nnx.Param, nnx.Param]:
    """Returns integers and scales. Without kernels a CPU stores the integers as float32."""
    whole, scale = quantized(rows.astype(np.float32))
    # XLA on a CPU would convert int8 in every call.
    stored = jnp.float32 if backend.on_cpu() and not cpu.kernels_in_use() else jnp.int8
    return nnx.Param(jnp.asarray(whole, stored)), nnx.Param(jnp.asarray(scale[:, 0]))


def _product(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns x @ (kernel * scale[:, None]).T, float32 [..., outputs]."""
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    if kernel.dtype == jnp.int8 and cpu.kernels_in_use():
        result = cpu.int8_rows(rows, kernel, scale)
    else:
        result = jnp.matmul(rows, kernel.T.astype(rows.dtype)) * scale
    return result.reshape(*x.shape[:-1], len(kernel))


def quantized(rows: Any) -> tuple[Any, Any]:
    """Returns int8 [R, C] and float32 scales [R, 1] whose product is nearest to `rows` [R, C].

    `rows` is a float32 array of JAX or of NumPy, and so are the results, with the same bits.
    """
    xp: Any = rows.__array_namespace__()
    if xp is np and len(rows) > ROWS:
        parts = [quantized(part) for part in np.split(rows, range(ROWS, len(rows), ROWS))]
        whole, scale = (np.concatenate(each) for each in zip(*parts, strict=True))
        return whole, scale
    largest = xp.max(xp.abs(rows), axis=-1, keepdims=True)
    # Products with reciprocals, as XLA computes both divisions. Rows of zeros get a normal scale.
    scale = xp.maximum(largest, LARGEST * np.finfo(np.float32).tiny) * np.float32(1 / LARGEST)
    return xp.round(rows * (np.float32(1) / scale)).astype(np.int8), scale


def quantize(model: AnyDecoder) -> AnyDecoder:
    """Returns a copy of a model with int8 products.

    Norms, the cache, and an embedding that is not the head stay float32.

    Raises:
      UserError: the model is quantized already, or is not a `Transformer` or `Llama`.
    """
    if not isinstance(model, Decoder):
        raise UserError(
            f"dtype='int8': {type(model).__name__} has no int8 layers; give float32 or bfloat16"
        )
    copy: Any = nnx.clone(model)
    for _, module in list(nnx.iter_modules(copy)):
        for name, part in list(vars(module).items()):
            if isinstance(part, Int8Linear):
                raise UserError("this model is quantized already; give one in float32 or bfloat16")
            if isinstance(part, nnx.Linear):
                setattr(module, name, Int8Linear(part))
    if copy.head is None:
        copy.embed = Int8Embed(copy.embed)
    return copy
