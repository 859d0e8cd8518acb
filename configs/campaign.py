"""One training of `scripts/campaign.sh`: the paper's ladder on packed open text, on one data-centre GPU, in minutes.

    scripts/campaign.sh DATA WORK

The recipe is `open_text_config`'s: 10,000 steps of 256 rows of 128 tokens, 320 million in all, four passes over the
corpus that results/README.md names. The campaign lowers `steps` to what fits its limits.
"""

from spectr_jax.config import open_text_config


def get_config(model: str = "target_97m"):
    config = open_text_config(model)
    config.batch_size = 256
    config.steps = 10_000
    config.optimizer.warmup_steps = 300
    config.log_every = 100
    config.eval_every = 2_000
    config.checkpoint_every = 2_000
    config.keep_checkpoints = 1
    return config
