"""SpecTr, Tables 2 and 4: tokens per serial call of the 97M with drafts of 2M, 6M and 20M on LM1B.

    scripts/train_ladder.sh runs/lm1b    # trains the four models, then runs this
    python -m spectr_jax.eval --config=configs/table2.py --workdir=runs/table2

1,000 test prompts, three seeds, temperature 1, K in {1, 2, 4, 8}, L in {4, 8}. All rows together
are Table 4; those of the 6M draft are Table 2. It is made for an accelerator: two CPU cores would
decode for more than a day, 79 rows on 1,000 prompts. docs/training.md has a table of seven rows that
takes four minutes there.
"""

from spectr_jax.experiments.config import eval_config


def get_config():
    config = eval_config()
    config.target = "runs/lm1b/target_97m"
    config.drafts = ("runs/lm1b/draft_2m", "runs/lm1b/draft_6m", "runs/lm1b/draft_20m")
    config.prompts = "tfds:lm1b:test"
    return config
