"""Where JAX computes. Programs that differ between CPUs and accelerators ask `on_cpu`."""

import jax


def on_cpu() -> bool:
    """Returns whether JAX computes on a CPU."""
    return jax.default_backend() == "cpu"
