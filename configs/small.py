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
from spectr_jax.training.config import open_text_config
from spectr_jax.utils.errors import unknown

SHAPES = {"target": "draft_6m", "draft": "draft_2m"}
STEPS = {"target": 500, "draft": 300}


def get_config(part: str = "target"):
    if part in OTHERS:
        return OTHERS[part]()
    if part not in SHAPES:
        raise unknown("part of the small ladder", part, [*SHAPES, *OTHERS])
    config = open_text_config(SHAPES[part])
    config.model.update(vocab_size=2_048, dtype="float32")  # Not all CPUs have bfloat16 products.
    config.data.update(train="my_text/train.txt", heldout="my_text/heldout.txt")
    config.data.update(heldout_sentences=500, tokenizer_sentences=50_000)
    config.data.tokenizer = "runs/small/tokenizer.model"  # Trained by the first of the two runs.
    config.update(batch_size=32, steps=STEPS[part], log_every=25, keep_checkpoints=1)
    config.update(eval_every=100, checkpoint_every=100)
    config.optimizer.warmup_steps = 30
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
    config = distil_config("2m")
    config.model.dtype = "float32"
    config.update(steps=100, log_every=10, eval_every=50, checkpoint_every=50, keep_checkpoints=1)
    config.optimizer.warmup_steps = 10
    return config


OTHERS = {"table": _table, "student": _student}
