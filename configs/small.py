"""A first hour on two CPU cores: models of your own text, their table, and a draft for SmolLM2.

    python -m spectr_jax.train --config=configs/small.py:target --workdir=runs/small/target
    python -m spectr_jax.train --config=configs/small.py:draft --workdir=runs/small/draft
    python -m spectr_jax.eval --config=configs/small.py:table --workdir=runs/small/table
    python -m spectr_jax.train --config=configs/small.py:student --workdir=runs/small/student

The text is my_text/train.txt and my_text/heldout.txt, one sentence per line. On two cores the
target trains for 3 minutes, the draft for half a minute, and the table takes 20 seconds to compile.
docs/first_hour.md explains the commands, and labels text for the student.
"""

from spectr_jax.distillation.config import distil_config
from spectr_jax.experiments.config import eval_config
from spectr_jax.training.config import train_config
from spectr_jax.utils.errors import unknown


def get_config(part: str = "target"):
    if part not in PARTS:
        raise unknown("part of the small ladder", part, PARTS)
    return PARTS[part]()


def _model(shape: str, steps: int, learning_rate: float):
    config = train_config(shape)
    # Not all CPUs have bfloat16 products.
    config.model.update(vocab_size=2_048, context=128, dropout=0.0, dtype="float32")
    config.data.update(train="my_text/train.txt", heldout="my_text/heldout.txt")
    config.data.update(heldout_sentences=500, tokenizer_sentences=50_000)
    config.data.tokenizer = "runs/small/tokenizer.model"  # Trained by the first of the two runs.
    config.update(batch_size=32, steps=steps)
    config.optimizer.update(name="muon", b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1, clip_norm=1.0)
    config.optimizer.update(schedule="cosine", learning_rate=learning_rate, warmup_steps=30)
    config.update(log_every=25, eval_every=100, checkpoint_every=100, keep_checkpoints=1)
    return config


def _table():
    config = eval_config()
    config.target, config.drafts = "runs/small/target", ("runs/small/draft",)
    config.prompts = "my_text/heldout.txt"
    # Each method, K and L is a program to compile, which takes longer than its run.
    config.update(num_drafts=(1, 4), draft_lengths=(4,), methods=("spectr", "otm_layer"))
    config.update(num_prompts=64, batch_size=16, max_new_tokens=32, seeds=(0,))
    config.optimal_acceptance = False
    return config


def _student():
    config = distil_config()
    config.model.update(layers=3, width=128, mlp=512, heads=4, kv_heads=4, dtype="float32")
    config.model.update(head_tokens=8_192, embed_rank=96)
    config.data.update(train="labels/train", heldout=("labels/heldout",))
    config.update(loss="kl", batch_size=32, steps=100)
    config.optimizer.update(name="muon", b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1, clip_norm=1.0)
    config.optimizer.update(schedule="cosine", learning_rate=0.02, warmup_steps=10)
    config.update(log_every=10, eval_every=50, checkpoint_every=50, keep_checkpoints=1)
    return config


PARTS = {
    "target": lambda: _model("draft_6m", steps=500, learning_rate=0.025),
    "draft": lambda: _model("draft_2m", steps=300, learning_rate=0.04),
    "table": _table,
    "student": _student,
}
