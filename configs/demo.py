"""Tokens per serial call of a 6M target with 2M drafts, in the form of SpecTr's Table 2 at L = 4.

    python -m spectr_jax.eval --config=configs/demo.py --workdir=runs/demo
    python -m spectr_jax.eval --config=configs/demo.py:full --workdir=runs/demo_full

`small`, the default, takes one or two minutes on two CPU cores, most of it to compile 8 programs.
`full` adds `otm`, L = 8 and alpha*, and takes 10 to 40 minutes, half of it to compile 47 programs.
Both models were trained on the open corpus of results/README.md, and the prompts are our own. The
paper's column is for its 2M draft and 97M target on LM1B.
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
