"""Tokens per serial call of the ladder that was trained on two CPU cores: a 20M target, drafts of 2M and 6M.

    python -m spectr_jax.eval --config=configs/ladder.py --workdir=runs/ladder

The form of SpecTr's Tables 2 and 4 with a target that a CPU can train (`configs/embedded.py:draft_20m`); prompts
of ours. The paper's column is for its 97M target on LM1B. An hour or more on two CPU cores.
"""

from spectr_jax.config import eval_config


def get_config():
    config = eval_config()
    config.target = "embedded:20m"
    config.drafts = ("embedded:2m", "embedded:6m")
    config.num_prompts = 48
    config.batch_size = 16
    config.max_new_tokens = 32
    return config
