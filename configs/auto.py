"""The fastest method for a pair of models on this machine: predicted first, then tried.

    python -m spectr_jax.eval --config=configs/auto.py --workdir=runs/auto

The default is the 6M target with the 2M draft, one sequence at a time, on 32 prompts. It takes
minutes on two CPU cores. Set --config.target and --config.draft for other models
(random:target_97m and random:draft_6m for the times of untrained ones), and --config.batch_size for
more sequences.
"""

from spectr_jax.experiments.config import auto_config


def get_config():
    config = auto_config()
    config.num_prompts = 32
    config.batch_size = 1
    return config
