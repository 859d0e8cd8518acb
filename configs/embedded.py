"""The embedded ladder: the small models that ship in spectr_jax/embedded.

    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296
    python -m spectr_jax.train --config=configs/embedded.py:draft_2m --workdir=runs/embedded/draft_2m
    python -m spectr_jax.train --config=configs/embedded.py:draft_6m --workdir=runs/embedded/draft_6m

Less than one pass over a corpus of 80 M tokens, so no dropout, and a cosine to zero; hours on two CPU cores. The
environment variable gives the C library's heap huge pages, which saves time on Linux.
"""

from spectr_jax.config import train_config

STEPS = {"draft_2m": 2_500, "draft_6m": 2_500, "draft_20m": 650}
BATCH_SIZE = {"draft_2m": 32, "draft_6m": 32, "draft_20m": 64}
LEARNING_RATE = {"draft_2m": 0.04, "draft_6m": 0.025, "draft_20m": 0.018}


def get_config(model: str = "draft_6m"):
    config = train_config(model)
    config.data.train = "../shared/corpus/train-*.txt.xz"
    config.data.heldout = "../shared/corpus/heldout-*.txt.xz"
    config.data.tokenizer = "spectr_jax/embedded/tokenizer.model"
    config.model.dropout = 0.0
    config.model.dtype = "bfloat16"
    config.batch_size = BATCH_SIZE[model]
    config.steps = STEPS[model]
    config.optimizer.name = "muon"
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = LEARNING_RATE[model]
    config.optimizer.warmup_steps = 50
    config.log_every = 25
    config.eval_every = 250
    config.checkpoint_every = 100
    return config
