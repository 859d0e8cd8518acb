"""Bits per character of models on held-out sentences, in float32, bfloat16 and int8.

    python -m spectr_jax.eval --config=configs/quality.py --workdir=runs/quality \\
        --config.heldout='my_text/heldout-*'

The default models are the 2M and the 6M; set --config.models for others, such as smollm2. Give your
own text, one sentence per line. All models score the same sentences, those that fit every model's
context. It takes minutes on two CPU cores; smollm2 takes a quarter of an hour for 1,000 sentences.
"""

from spectr_jax.experiments.config import quality_config


def get_config():
    config = quality_config()
    config.heldout = "my_text/heldout-*"
    return config
