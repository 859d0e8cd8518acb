"""The ladder that two CPU cores can train on open text: the 2M, 6M and 20M models.

    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
    python -m spectr_jax.train --config=configs/embedded.py:draft_20m --workdir=runs/draft_20m \\
        --config.data.train='my_text/train-*' --config.data.heldout='my_text/heldout-*'

Give your own text, one sentence per line. The corpus of the published models (results/README.md)
is not distributed. The recipe is that of configs/open_text.py, for a fraction of one pass over 86 M
tokens.
On cores with bfloat16 products the 2M takes 5 minutes, the 6M 15 and the 20M 45: some 10 million
tokens each. On other cores each takes one to four hours. configs/small.py has smaller models. The
published weights continued such runs to 63 to 81 M tokens, with one cosine schedule per stretch
(results/notes/2026-11-embedded.md). The environment variable requests huge pages, which saves time
on Linux.
"""

from spectr_jax.training.config import train_config
from spectr_jax.utils.errors import unknown

RATES = {"draft_2m": 0.04, "draft_6m": 0.025, "draft_20m": 0.018}
BATCH_SIZE = {"draft_2m": 32, "draft_6m": 32, "draft_20m": 64}
STEPS = {"draft_2m": 2_500, "draft_6m": 2_500, "draft_20m": 1_350}


def get_config(model: str = "draft_6m"):
    if model not in STEPS:
        raise unknown("model of this ladder", model, STEPS)
    config = train_config(model)
    config.model.update(vocab_size=8_192, context=128, dropout=0.0, dtype="bfloat16")
    config.data.update(train="my_text/train-*", heldout="my_text/heldout-*")
    config.data.tokenizer = "spectr_jax/embedded/tokenizer.model"
    config.update(batch_size=BATCH_SIZE[model], steps=STEPS[model])
    config.optimizer.update(name="muon", b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1, clip_norm=1.0)
    config.optimizer.update(schedule="cosine", learning_rate=RATES[model], warmup_steps=50)
    config.update(log_every=25, eval_every=250, checkpoint_every=100)
    return config
