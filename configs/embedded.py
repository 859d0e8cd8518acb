"""The ladder that two CPU cores can train on open text: the 2M, 6M and 20M models.

    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
    python -m spectr_jax.train --config=configs/embedded.py:draft_20m --workdir=runs/draft_20m --config.data.train=FILES

The corpus of results/README.md, whose place here is the default, is not distributed: give text of yours, one sentence a
line, as --config.data.train='my_text/train-*' --config.data.heldout='my_text/heldout-*'.
The recipe is `open_text_config`'s, for far less than one pass over a corpus of 86 M tokens: minutes for the 2M and 6M and
three quarters of an hour for the 20M on cores with bfloat16 products, one to four hours each on others. The weights in
spectr_jax/embedded were trained on from such runs, in stretches of a cosine each, for 63 to 81 M tokens in all
(results/notes/2026-11-embedded.md). The environment variable gives the heap huge pages, which saves time on Linux.
"""

from spectr_jax.training.config import open_text_config
from spectr_jax.utils.errors import unknown

STEPS = {"draft_2m": 2_500, "draft_6m": 2_500, "draft_20m": 1_350}
BATCH_SIZE = {"draft_2m": 32, "draft_6m": 32, "draft_20m": 64}


def get_config(model: str = "draft_6m"):
    if model not in STEPS:
        raise unknown("model of this ladder", model, STEPS)
    config = open_text_config(model)
    config.data.train = "../shared/corpus/train-*.txt.xz"
    config.data.heldout = "../shared/corpus/heldout-*.txt.xz"
    config.data.tokenizer = "spectr_jax/embedded/tokenizer.model"
    config.batch_size = BATCH_SIZE[model]
    config.steps = STEPS[model]
    config.optimizer.warmup_steps = 50
    config.log_every = 25
    config.eval_every = 250
    config.checkpoint_every = 100
    return config
