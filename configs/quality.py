"""Bits per character of the models on held-out sentences, in float32, bfloat16 and int8.

    python -m spectr_jax.eval --config=configs/quality.py --workdir=runs/quality --config.heldout='my_text/heldout-*'

The embedded pair; --config.models for others, such as smollm2. The corpus of results/README.md, whose place here is the
default, is not distributed: give text of yours, one sentence a line. All models score the same sentences, those that fit the
context of each of them. Minutes on two CPU cores; smollm2 takes a quarter of an hour for 1,000 sentences.
"""

from spectr_jax.experiments.config import quality_config


def get_config():
    config = quality_config()
    config.heldout = "my_text/heldout-*"
    return config
