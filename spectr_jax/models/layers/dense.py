"""Linear layers of all decoders: factors in the model's dtype, sums in float32."""

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.models.layers import cpu


@jax.custom_vjp
def _dense(x, kernel):
    rows = x.reshape(-1, x.shape[-1])
    product = cpu.float_columns(rows.astype(jnp.float32), kernel) if cpu.few(len(rows)) else _matmul(rows, kernel)
    return product.reshape(*x.shape[:-1], -1)


def _matmul(x, kernel):
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _dense_backward(residuals, g):
    x, kernel = residuals
    g = g.astype(x.dtype)
    x_transposed, kernel_transposed = cpu.in_memory(x.reshape(-1, x.shape[-1]).T), cpu.in_memory(kernel.T)
    x_gradient, kernel_gradient = _matmul(g, kernel_transposed), _matmul(x_transposed, g.reshape(-1, g.shape[-1]))
    return x_gradient.astype(x.dtype), kernel_gradient.astype(kernel.dtype)


_dense.defvjp(lambda x, kernel: (_dense(x, kernel), (x, kernel)), _dense_backward)


def _dot_general(x, kernel, *_, **__):
    """One function for all layers: graphdefs are equal, and share a program, only where their functions are the same."""
    return _dense(x, kernel)


def dense_layer(inputs: int, outputs: int, *, use_bias=True, kernel_init=None, dtype, rngs) -> nnx.Linear:
    """A linear layer whose products are `_dense`: factors of `dtype`, sums of float32."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=dtype,
        kernel_init=kernel_init or nnx.initializers.xavier_uniform(),
        dot_general=_dot_general,
        rngs=rngs,
    )


class Embed(nnx.Embed):
    """An embedding that can be the head too."""

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits [..., V] float32 of `x` [..., E]."""
        rows = x.reshape(-1, x.shape[-1]).astype(self.dtype)
        if not cpu.few(len(rows)):
            return super().attend(x).astype(jnp.float32)
        table = self.embedding[...].astype(self.dtype)
        return cpu.float_rows(rows.astype(jnp.float32), table).reshape(*x.shape[:-1], -1)
