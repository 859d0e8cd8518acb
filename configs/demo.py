"""Tokens per serial call of the embedded ladder: the form of SpecTr's Table 2 at L = 4, in a minute or two on two CPU cores.

    python -m spectr_jax.eval --config=configs/demo.py --workdir=runs/demo
    python -m spectr_jax.eval --config=configs/demo.py:full --workdir=runs/demo_full  # `otm`, L = 8, alpha*: 10 to 40 min

The 6M model is the target and the 2M model the draft, both trained on the open corpus that results/README.md names,
with prompts of our own; the paper's column is for its 2M draft and 97M target on LM1B.
"""

from spectr_jax.experiments.config import eval_config
from spectr_jax.utils.errors import unknown

SIZES = ("small", "full")


def get_config(size: str = "small"):
    if size not in SIZES:
        raise unknown("size of this table", size, SIZES)
    config = eval_config()
    config.num_prompts = 128
    config.batch_size = 16
    config.max_new_tokens = 32
    if size == "small":
        config.num_prompts = 32
        config.draft_lengths = (4,)
        config.seeds = (0, 1)
        config.methods = ("spectr", "otm_layer")
        config.optimal_acceptance = False
    return config
