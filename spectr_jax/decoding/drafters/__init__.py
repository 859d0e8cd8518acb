"""Drafters: where the drafts of a call come from. One file each."""

from spectr_jax.decoding.drafters.base import (
    Drafter,
    Drafts,
    NoDrafts,
    Sequences,
    Setup,
    Verified,
    without_p,
)
from spectr_jax.decoding.drafters.draft_model import DraftModel
from spectr_jax.decoding.drafters.early_exit import EarlyExit
from spectr_jax.decoding.drafters.feature_model import FeatureModel
from spectr_jax.decoding.drafters.lookup import Lookup

__all__ = [
    "DraftModel",
    "Drafter",
    "Drafts",
    "EarlyExit",
    "FeatureModel",
    "Lookup",
    "NoDrafts",
    "Sequences",
    "Setup",
    "Verified",
    "without_p",
]
