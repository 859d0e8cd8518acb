"""Every method at equal numbers of drafted tokens, and ERSD's Figures 3 and 4.

    python -m spectr_jax.eval --config=configs/trees.py --workdir=runs/trees

The 2M model drafts for the 6M model. It takes 40 minutes to two hours on two CPU cores, much of
it to compile a hundred programs. Set --config.target and --config.draft for another pair.
"""

from spectr_jax.experiments.config import trees_config


def get_config():
    config = trees_config()
    config.num_prompts = 64
    config.batch_size = 16
    config.max_new_tokens = 32
    return config
