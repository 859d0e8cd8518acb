"""The order of an array's axes in memory, which decides how fast XLA multiplies it on a CPU."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def in_memory(x: jax.Array) -> jax.Array:
    """`x` with its axes in memory in their order; a transpose before it is otherwise left to the product that reads it."""
    return jax.lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
