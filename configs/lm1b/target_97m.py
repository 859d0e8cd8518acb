"""The 97M target of the paper (SpecTr, section 8; Leviathan et al., 2023), on LM1B.

    scripts/prepare_lm1b.sh                                        # once
    python -m spectr_jax.train --config=configs/lm1b/target_97m.py --workdir=runs/lm1b/target_97m

It is made for accelerators: two CPU cores would take five months (250 tokens per second).

The recipe is `lm1b_config`, for a GPU or a TPU slice with any number of hosts. Neither the recipe
nor LM1B was tried. Estimated time for 3.2 billion tokens: two and a quarter hours at the 390,000
tokens per second that an H200 was measured to train (22 % of its peak; packed text, Muon, no
dropout).

This command tokenizes LM1B while it trains, in more than five hours of a core.
scripts/train_ladder.sh does so once for all four models, in a quarter of an hour of a core
(docs/training.md).

A step on 256 rows takes 26 GB of an H100 and 14.6 GB of a TPU v5e, as compiled for them
(results/compiled). Where that does not fit: --config.accumulate=2 or --config.remat=True.
"""

from spectr_jax.training.config import lm1b_config


def get_config():
    return lm1b_config("target_97m")
