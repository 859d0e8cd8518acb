"""The paper's ladder on open text that is packed once, as in `DATA=... scripts/train_ladder.sh`.

    python -m spectr_jax.pack --data='corpus/train-*.txt.xz' --out=packed
    python -m spectr_jax.train --config=configs/open_text.py:target_97m \\
        --workdir=runs/open/target_97m --config.data.train=packed:packed \\
        --config.data.tokenizer=packed/tokenizer.model --config.data.heldout='corpus/heldout-*'

The models are draft_2m, draft_6m, draft_20m and target_97m. The recipe has no dropout, bfloat16
products, Muon and a cosine to zero. Its 10,000 steps of 256 rows of 128 tokens are 317 million
tokens, 3.7 passes over the corpus of results/README.md. It is meant for one data-centre GPU; the
97M trains at 390,000 tokens per second on an H200. The published 97M took 5,800 such steps; 10,000
were not tried.

The number of tokens sets the time. Two CPU cores would train the 2M for 2 to 6 hours, the 6M for 5
to 17 hours, the 20M for 20 to 70 hours and the 97M for two weeks; they are fastest with bfloat16
products. configs/embedded.py is made for CPUs, and configs/small.py takes minutes.
"""

from spectr_jax.training.config import train_config

# Tuned with the small models on a CPU. Wider models take lower rates.
RATES = {"draft_2m": 0.04, "draft_6m": 0.025, "draft_20m": 0.018, "target_97m": 0.008}


def get_config(model: str = "target_97m"):
    config = train_config(model)  # Give the data as in the command above.
    config.model.update(vocab_size=8_192, context=128, dropout=0.0, dtype="bfloat16")
    config.update(batch_size=256, steps=10_000)
    config.optimizer.update(name="muon", b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1, clip_norm=1.0)
    config.optimizer.update(schedule="cosine", learning_rate=RATES[model], warmup_steps=300)
    config.update(log_every=100, eval_every=2_000, checkpoint_every=2_000, keep_checkpoints=1)
    return config
