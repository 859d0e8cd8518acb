"""The 6M draft of the paper (SpecTr, section 8; Leviathan et al., 2023), on LM1B.

    scripts/prepare_lm1b.sh                                        # once
    python -m spectr_jax.train --config=configs/lm1b/draft_6m.py --workdir=runs/lm1b/draft_6m

The recipe is `lm1b_config`'s. For a GPU or a TPU slice, any number of hosts. Time, estimated and
not measured: 7.4e16 FLOPs, four minutes of an H100 at a third of its peak, but at least the two
hours that one process needs to pack 3.2 billion tokens (450,000 tokens/s on a core of 2026; several
hosts share that).
"""

from spectr_jax.training.config import lm1b_config


def get_config():
    return lm1b_config("draft_6m")
