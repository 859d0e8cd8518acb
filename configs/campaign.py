"""One training of `scripts/campaign.sh`: the paper's ladder on packed open text, on one data-centre GPU, in minutes.

    scripts/campaign.sh DATA WORK

300 million tokens, four passes over the corpus that results/README.md names: so no dropout, and a cosine to zero; bfloat16
products, rows of 32,768 tokens a step, Muon at rates that fell out of runs of the small models on a CPU (wider models take
lower ones). The campaign lowers `steps` to what fits its limits.
"""

from spectr_jax.config import train_config

LEARNING_RATE = {"draft_2m": 0.04, "draft_6m": 0.025, "draft_20m": 0.018, "target_97m": 0.012}


def get_config(model: str = "target_97m"):
    config = train_config(model)
    config.model.dropout = 0.0
    config.model.dtype = "bfloat16"
    config.batch_size = 256
    config.steps = 10_000
    config.optimizer.name = "muon"
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = LEARNING_RATE[model]
    config.optimizer.warmup_steps = 300
    config.log_every = 100
    config.eval_every = 2_000
    config.checkpoint_every = 2_000
    config.keep_checkpoints = 1
    return config
