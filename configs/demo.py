"""Tokens per serial call of the embedded ladder: the form of SpecTr's Table 2, in minutes on two CPU cores.

    python -m spectr_jax.eval --config=configs/demo.py --workdir=results/demo

The 6M model is the target and the 2M model the draft, both trained on the open corpus that results/README.md names,
with prompts of our own; the paper's column is for its 2M draft and 97M target on LM1B.
"""

from spectr_jax.config import eval_config


def get_config():
    config = eval_config()
    config.num_prompts = 128
    config.batch_size = 16
    config.max_new_tokens = 32
    return config
