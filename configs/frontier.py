"""Methods on the same i.i.d. drafts: K paths of 8 tokens that branch at the root or later.

    python -m spectr_jax.eval --config=configs/frontier.py --workdir=runs/frontier

The 2M model drafts for the 20M model. Set --config.target and --config.draft for another pair.
"""

from spectr_jax.experiments.config import frontier_config


def get_config():
    config = frontier_config()
    config.target = "20m"
    config.num_prompts = 64
    config.batch_size = 16
    config.max_new_tokens = 32
    return config
