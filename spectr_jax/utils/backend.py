"""Where JAX computes. All code that differs between CPUs and accelerators asks `on_cpu`."""

import jax


def on_cpu() -> bool:
    """Returns whether JAX computes on a CPU."""
    return jax.default_backend() == "cpu"
