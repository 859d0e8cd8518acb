"""The fastest method for a pair of models on this machine: the baseline and a grid of methods.

    python -m spectr_jax.eval --config=configs/auto.py --workdir=runs/auto

The default is the 6M target with the 2M draft, one sequence at a time, on 16 prompts. It takes
about two minutes on two CPU cores, most of it to compile 13 programs. The machine must do nothing
else. Set --config.target and --config.draft for other models (random:target_97m and random:draft_6m
for the times of untrained ones), --config.batch_size for more sequences, and --config.candidates
for other methods and trees, such as "('block chain:2', 'lookup chain:4')".
"""

from spectr_jax.experiments.config import auto_config


def get_config():
    config = auto_config()
    config.num_prompts = 16
    config.batch_size = 1
    config.max_new_tokens = 32
    return config
