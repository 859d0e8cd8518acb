"""Which method is fastest here? Predicted for `methods`, K, L and trees from measured parts, then
tried.

    python -m spectr_jax.eval --config=configs/auto.py --workdir=runs/auto

One sequence at a time on the 20M and 2M models, 32 prompts: minutes on two CPU cores. Other models:
--config.target=PATH --config.draft=PATH, random:target_97m and random:draft_6m for times of
untrained ones; --config.batch_size for more sequences.
"""

from spectr_jax.experiments.config import auto_config


def get_config():
    config = auto_config()
    config.num_prompts = 32
    config.batch_size = 1
    return config
