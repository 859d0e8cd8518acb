"""Tokens per serial call with drafts of several sizes, in the form of SpecTr's Tables 2 and 4.

    python -m spectr_jax.eval --config=configs/ladder.py --workdir=runs/ladder
    python -m spectr_jax.eval --config=configs/ladder.py:97m --workdir=runs/target_97m
    python -m spectr_jax.eval --config=configs/ladder.py:smollm2 --workdir=runs/smollm2

- `20m`, the default, is the 20M target with drafts of 2M and 6M: 20 to 60 minutes on two CPU cores,
  more than half of it to compile 93 programs.
- `97m` is the paper's 97M target with drafts of 2M, 6M and 20M, in bfloat16, without `otm` and
  alpha*: 40 minutes, nearly all of it to decode 64 prompts in 61 rows.
- `smollm2` is SmolLM2-135M with its plain draft of 6M and the draft that sees its features, in
  bfloat16, without alpha*, on two seeds: 40 minutes, half of it to compile 53 programs.

The prompts are our own. The paper's column is for its 97M target on LM1B.
"""

from spectr_jax.experiments.config import eval_config
from spectr_jax.utils.errors import unknown

TARGETS = ("20m", "97m", "smollm2")


def get_config(target: str = "20m"):
    if target not in TARGETS:
        raise unknown("target of a ladder", target, TARGETS)
    config = eval_config()
    config.target = "20m"
    config.drafts = ("2m", "6m")
    config.num_prompts = 48
    config.batch_size = 16
    config.max_new_tokens = 32
    if target == "97m":
        config.target = "97m"
        config.drafts = (*config.drafts, "20m")
        config.methods = ("spectr", "otm_block", "otm_layer")
        config.update(dtype="bfloat16", num_prompts=64, batch_size=32, optimal_acceptance=False)
    if target == "smollm2":
        config.target = "smollm2"
        config.drafts = ("smollm2-6m", "smollm2-draft")
        config.update(dtype="bfloat16", num_prompts=32, seeds=(0, 1), optimal_acceptance=False)
    return config
