"""The 6M draft on LM1B."""

from spectr_jax.config import lm1b_config


def get_config():
    return lm1b_config("draft_2m")
