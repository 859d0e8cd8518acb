"""The paper's ladder on LM1B: the 97M target and its drafts of 20M, 6M and 2M parameters.

    scripts/prepare_lm1b.sh                                        # once
    python -m spectr_jax.train --config=configs/lm1b.py:draft_6m --workdir=runs/lm1b/draft_6m

The target and the 6M are of SpecTr, section 8 (Leviathan et al., 2023), the others of its appendix
F. The recipe is that of Flax's LM1B example with bfloat16 products, for a GPU or a TPU slice with
any number of hosts. Neither the recipe nor LM1B was tried, so these times are estimates:

| model | layers | width | one accelerator | two CPU cores |
| --- | ---: | ---: | --- | --- |
| `draft_2m` | 1 | 128 | 1 minute: 2.5e16 FLOPs | 3 days: 14,000 tokens/s |
| `draft_6m` | 2 | 256 | 4 minutes: 7.4e16 FLOPs | a week: 5,200 tokens/s |
| `draft_20m` | 4 | 512 | 16 minutes: 3.3e17 FLOPs | a month: 1,300 tokens/s |
| `target_97m` | 12 | 768 | 2.25 hours: 3.2e9 tokens | 5 months: 250 tokens/s |

The accelerator is an H100 at a third of its peak for the drafts. For the target it is an H200 at
the 390,000 tokens/s that it was measured to train (22 % of its peak; packed text, Muon, no
dropout).

This command tokenizes LM1B while it trains, in more than five hours of a core.
scripts/train_ladder.sh does so once for all four models, in a quarter of an hour of a core
(docs/training.md).

A step of the target on 256 rows takes 26 GB of an H100 and 14.6 GB of a TPU v5e, as compiled for
them (results/compiled). Where that does not fit: --config.accumulate=2 or --config.remat=True.
"""

from spectr_jax.training.config import train_config


def get_config(model: str = "draft_6m"):
    config = train_config(model)
    config.model.update(vocab_size=8_192, context=128, dropout=0.1, dtype="bfloat16")
    config.data.update(train="tfds:lm1b:train", heldout="tfds:lm1b:test")
    config.data.tokenizer = "runs/lm1b/tokenizer.model"  # Trained by the first of the four runs.
    config.update(batch_size=256, steps=100_000)
    config.optimizer.update(
        name="adamw", b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1, clip_norm=1.0
    )
    config.optimizer.update(schedule="rsqrt", learning_rate=0.0016, warmup_steps=1_000)
    return config
