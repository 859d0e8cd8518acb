"""The paper's ladder on open text that is packed once, as in `scripts/train_ladder.sh --data=...`.

    python -m spectr_jax.pack --data='corpus/train-*.txt.xz' --out=packed
    python -m spectr_jax.train --config=configs/open_text.py:target_97m \\
        --workdir=runs/open/target_97m --config.data.train=packed:packed \\
        --config.data.tokenizer=packed/tokenizer.model --config.data.heldout='corpus/heldout-*'

The recipe is `open_text_config` at 10,000 steps of 256 rows of 128 tokens: 317 million tokens, 3.7
passes over the corpus of results/README.md. It is meant for one data-centre GPU; the 97M trains at
390,000 tokens per second on an H200. The published 97M took 5,800 such steps; 10,000 were not
tried.

The number of tokens sets the time. Two CPU cores would train the 2M for 2 to 6 hours, the 6M for 5
to 17 hours, the 20M for 20 to 70 hours and the 97M for two weeks; they are fastest with bfloat16
products. configs/embedded.py is made for CPUs, and configs/small.py takes minutes.
"""

from spectr_jax.training.config import open_text_config


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
