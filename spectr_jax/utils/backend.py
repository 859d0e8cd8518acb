"""Where JAX computes. Programs that differ between CPUs and accelerators ask `on_cpu`."""

import jax

from spectr_jax.utils import sharding


def on_cpu() -> bool:
    """Returns whether programs are to have the form that is fast on a CPU.

    Programs that are split over the axis `model` have the form for accelerators on CPUs too: all
    devices must take the same steps.
    """
    return jax.default_backend() == "cpu" and sharding.model_devices() == 1


def on_tpu() -> bool:
    """Returns whether JAX computes on a TPU, which takes long for scattered updates."""
    return jax.default_backend() == "tpu"
