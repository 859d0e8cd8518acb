"""Linear layers of all decoders, with factors in the model's dtype and sums in float32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models.layers import cpu


class Linear(nnx.Linear):
    """A linear layer with factors in `dtype` and sums in float32.

    A float32 layer may have a bfloat16 kernel (`with_halved_kernels`), which products widen.
    """

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns float32 [..., outputs] of `inputs` [..., I]."""
        kernel = self.kernel[...]
        if kernel.dtype.itemsize >= jnp.dtype(self.dtype).itemsize:
            kernel = kernel.astype(self.dtype)
        product = _dense(inputs.astype(self.dtype), kernel)
        return product if self.bias is None else product + self.bias[...].astype(self.dtype)


@jax.custom_vjp
def _dense(x, kernel):
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= cpu.FEW and cpu.kernels_multiply(rows, kernel):
        product = cpu.float_columns(rows.astype(jnp.float32), kernel)
    else:
        product = _matmul(rows, kernel.astype(x.dtype))
    return product.reshape(*x.shape[:-1], kernel.shape[-1])


def _matmul(x, kernel):
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _dense_backward(residuals, g):
    x, kernel = residuals
    g = g.astype(x.dtype)
    x_transposed = cpu.in_memory(x.reshape(-1, x.shape[-1]).T)
    kernel_transposed = cpu.in_memory(kernel.astype(x.dtype).T)
    x_gradient = _matmul(g, kernel_transposed)
    kernel_gradient = _matmul(x_transposed, g.reshape(-1, g.shape[-1]))
    return x_gradient.astype(x.dtype), kernel_gradient.astype(kernel.dtype)


_dense.defvjp(lambda x, kernel: (_dense(x, kernel), (x, kernel)), _dense_backward)


def dense_layer(
    inputs: int, outputs: int, *, use_bias=True, kernel_init=None, dtype, rngs
) -> Linear:
    """Returns a `Linear` layer with this package's defaults."""
    init = kernel_init or nnx.initializers.xavier_uniform()
    return Linear(inputs, outputs, use_bias=use_bias, dtype=dtype, kernel_init=init, rngs=rngs)


def parted(joined: jax.Array, shards: int, sizes: Sequence[int]) -> list[jax.Array]:
    """Returns the parts [..., C_i] of a joined product [..., C], with C_i in proportion to `sizes`.

    With several `shards`, the product has a share of each part for each shard
    (`models.parallel`).
    """
    channels = joined.shape[-1] // shards
    ends = np.cumsum(sizes)[:-1] * channels // sum(sizes)
    by_shard = joined.reshape(*joined.shape[:-1], shards, channels)
    parts = jnp.split(by_shard, ends, axis=-1)
    return [part.reshape(*joined.shape[:-1], -1) for part in parts]


def with_halved_kernels(model: nnx.Module) -> nnx.Module:
    """Returns a copy with float32 kernels of linear layers in bfloat16 where that is lossless."""
    copy = nnx.clone(model)
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, Linear) and module.kernel[...].dtype == jnp.float32:
            bits = np.asarray(module.kernel[...]).view(np.uint32)
            if not np.any(bits & 0xFFFF):  # The half that bfloat16 lacks.
                halved = module.kernel[...].astype(jnp.bfloat16)
                module.kernel = nnx.Param(jax.block_until_ready(halved))
    return copy


class Embed(nnx.Embed):
    """An embedding that can be the head too."""

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns logits [..., V] float32 of `query` [..., E]."""
        rows = query.reshape(-1, query.shape[-1]).astype(self.dtype)
        table = self.embedding[...].astype(self.dtype)
        if len(rows) > cpu.FEW or not cpu.kernels_multiply(rows, table):
            return _matmul(rows, table.T).reshape(*query.shape[:-1], -1)
        return cpu.float_rows(rows.astype(jnp.float32), table).reshape(*query.shape[:-1], -1)
