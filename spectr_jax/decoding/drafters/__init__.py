"""Drafters: where the drafts of a call come from. A file for each, and what they share."""

from spectr_jax.decoding.drafters.base import Drafter as Drafter
from spectr_jax.decoding.drafters.base import Drafts as Drafts
from spectr_jax.decoding.drafters.base import NoDrafts as NoDrafts
from spectr_jax.decoding.drafters.base import Sequences as Sequences
from spectr_jax.decoding.drafters.base import Setup as Setup
from spectr_jax.decoding.drafters.base import Verified as Verified
from spectr_jax.decoding.drafters.base import without_p as without_p
from spectr_jax.decoding.drafters.draft_model import DraftModel as DraftModel
from spectr_jax.decoding.drafters.early_exit import EarlyExit as EarlyExit
from spectr_jax.decoding.drafters.feature_model import FeatureModel as FeatureModel
from spectr_jax.decoding.drafters.recall import Recall as Recall
