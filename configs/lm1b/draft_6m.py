"""The 6M draft of the paper (SpecTr, section 8; Leviathan et al., 2023), on LM1B.

    scripts/prepare_lm1b.sh                                        # once
    python -m spectr_jax.train --config=configs/lm1b/draft_6m.py --workdir=runs/lm1b/draft_6m

It is made for accelerators: two CPU cores would take a week (5,200 tokens per second).

The recipe is `lm1b_config`, for a GPU or a TPU slice with any number of hosts. Estimated, not
measured: 7.4e16 FLOPs, four minutes on an H100 at a third of its peak.

This command tokenizes LM1B while it trains, in more than five hours of a core.
scripts/train_ladder.sh does so once for all four models, in a quarter of an hour of a core
(docs/training.md).
"""

from spectr_jax.training.config import lm1b_config


def get_config():
    return lm1b_config("draft_6m")
