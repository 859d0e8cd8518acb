"""The fastest method for a pair of models on this machine: predicted first, then tried.

    python -m spectr_jax.eval --config=configs/auto.py --workdir=runs/auto
    python -m spectr_jax.eval --config=configs/auto.py:small --workdir=runs/auto_small

The default is the 6M target with the 2M draft, one sequence at a time, on 32 prompts. It takes ten
minutes on two CPU cores, most of it to compile 66 programs. `small` has four methods and trees of
up to 16 nodes, which are the fastest on a CPU. It takes two minutes for 32 programs. The machine
must do nothing else. Set --config.target and --config.draft for other models
(random:target_97m and random:draft_6m for the times of untrained ones), and --config.batch_size for
more sequences.
"""

from spectr_jax.experiments.config import auto_config
from spectr_jax.utils.errors import unknown

SIZES = ("full", "small")


def get_config(size: str = "full"):
    if size not in SIZES:
        raise unknown("size of this search", size, SIZES)
    config = auto_config()
    config.num_prompts = 32
    config.batch_size = 1
    if size == "small":
        config.methods = ("speculative", "block", "otm_block", "otm_layer")
        config.update(num_drafts=(1, 2), draft_lengths=(1, 2, 3, 4), size=16, tries=10)
        config.update(num_prompts=16, max_new_tokens=32)
    return config
