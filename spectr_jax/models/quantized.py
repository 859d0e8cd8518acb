"""Eight-bit products for decoding: a call reads a quarter of the bytes.

Weights have a scale for each output, activations one for each token (vector-wise quantisation: Dettmers et al., 2022,
arXiv 2208.07339, section 2), and products are summed in int32. The output follows the distribution of the quantised
model exactly,
whatever the method; `configs/quality.py` measures how far that is from the original model.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.errors import UserError
from spectr_jax.models.transformer import Transformer, pair_lone_row

LARGEST = 127


class Int8Linear(nnx.Module):
    """A linear layer with an int8 kernel [outputs, inputs]; raises `UserError` if that of `linear` is of integers."""

    def __init__(self, linear: nnx.Linear):
        if not jnp.issubdtype(linear.kernel.dtype, jnp.floating):
            raise UserError(f"a kernel of {linear.kernel.dtype} cannot be quantized; give a model in float32 or bfloat16")
        kernel = jnp.asarray(linear.kernel[...], jnp.float32)
        whole, scale = quantized(kernel.T)
        self.kernel, self.scale = nnx.Param(whole), nnx.Param(scale[:, 0])
        self.bias = None if linear.bias is None else nnx.Param(jnp.asarray(linear.bias[...], jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Float32 [..., outputs] of float32 [..., inputs]."""
        rows = x.reshape(-1, x.shape[-1])
        if jax.default_backend() == "gpu":  # XLA (jax 0.11) fails there on a transpose fused with a conversion to int8.
            rows = jax.lax.optimization_barrier(rows)
        whole, scale = quantized(rows)
        product = jax.lax.dot_general(
            pair_lone_row(whole), self.kernel[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32
        )
        result = product[: len(whole)].astype(jnp.float32) * scale * self.scale[...]
        if self.bias is not None:
            result += self.bias[...]
        return result.reshape(*x.shape[:-1], -1)


def quantized(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 [R, C] and float32 scales [R, 1], whose product is nearest to `rows` [R, C]."""
    scale = jnp.maximum(jnp.max(jnp.abs(rows), axis=-1, keepdims=True), jnp.finfo(jnp.float32).tiny) / LARGEST
    return jnp.round(rows / scale).astype(jnp.int8), scale


def quantize(model: Transformer) -> Transformer:
    """A copy of a float32 model with int8 products; embeddings, norms and cache stay float32.

    Raises:
      UserError: the model is quantized already, or no transformer.
    """
    if not isinstance(model, Transformer):
        raise UserError(f"a {type(model).__name__} has no int8 products; give float32 or bfloat16")
    copy: Transformer = nnx.clone(model)
    for block in copy.blocks:
        for name in ("qkv", "out", "up", "down"):
            setattr(block, name, Int8Linear(getattr(block, name)))
    copy.head = Int8Linear(copy.head)  # type: ignore[assignment]
    return copy
