"""Models by name, and pairs of a target and its drafts."""

from spectr_jax.loading.by_name import DTYPES, Trained, load, register_loader
from spectr_jax.loading.pairs import load_alone, load_pair

__all__ = ["DTYPES", "Trained", "load", "load_alone", "load_pair", "register_loader"]
