"""Linear layers of all decoders: factors in the model's dtype, sums in float32, and what a CPU needs to be fast at them."""

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.models.layers.layout import in_memory

FEW_ROWS = 4
SMALL_KERNEL = 2**20
"""In bytes; up to this the calls themselves take most of the time of a product (results/notes/2026-11-speed.md)."""


@jax.custom_vjp
def _dense(x, kernel):
    rows = x.reshape(-1, x.shape[-1])
    if _one_by_one(rows, kernel):
        products = jnp.concatenate([_matmul(row[None], kernel) for row in rows])
    else:
        products = _matmul(pair_lone_row(rows), kernel)[: len(rows)]
    return products.reshape(*x.shape[:-1], -1)


def pair_lone_row(rows: jax.Array) -> jax.Array:
    """`rows` [R, C]; on a CPU, a single row of bfloat16 or int8 is repeated.

    XLA's CPU library has products of bfloat16 and int8 of two rows on; for one row XLA converts the kernel, eight times
    slower.
    """
    lone = len(rows) == 1 and rows.dtype != jnp.float32 and jax.default_backend() == "cpu"
    return jnp.concatenate([rows, rows]) if lone else rows


def _matmul(x, kernel):
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _one_by_one(rows, kernel) -> bool:
    """Whether so few rows are multiplied faster one by one: a CPU, float32, and a kernel beyond `SMALL_KERNEL`.

    XLA's CPU library copies the kernel into an order of its own for two rows or more, and reads it as it is for one, whose
    bits are then also those of a call on one token alone.
    """
    few = 1 < len(rows) <= FEW_ROWS and rows.dtype == jnp.float32 and kernel.nbytes > SMALL_KERNEL
    return few and jax.default_backend() == "cpu"


def _dense_backward(residuals, g):
    x, kernel = residuals
    g = g.astype(x.dtype)
    x_transposed, kernel_transposed = _transposed(x.reshape(-1, x.shape[-1])), _transposed(kernel)
    x_gradient, kernel_gradient = _matmul(g, kernel_transposed), _matmul(x_transposed, g.reshape(-1, g.shape[-1]))
    return x_gradient.astype(x.dtype), kernel_gradient.astype(kernel.dtype)


def _transposed(x: jax.Array) -> jax.Array:
    """The transpose of `x` [R, C], in memory on a CPU: XLA's products of transposed factors run at half the speed there."""
    return in_memory(x.T) if jax.default_backend() == "cpu" else x.T


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
