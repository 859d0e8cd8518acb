"""The old place of `spectr_jax.load`, under its old name."""

from spectr_jax.loading import load as load_trained

__all__ = ["load_trained"]
