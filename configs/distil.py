"""A draft for any target: a small student that learns the distribution of its teacher.

Students are 2m, 6m and 20m; eagle, which sees the teacher's features; and eagle3, which sees those
of three layers.

    python -m spectr_jax.label --text='corpus/train-*.txt.xz' --count=20000 --out=labels/train
    python -m spectr_jax.label --text='corpus/heldout-*' --count=512 --out=labels/heldout
    python -m spectr_jax.train --config=configs/distil.py:6m --workdir=runs/draft_6m \\
        --config.steps=600
    python -m spectr_jax.export --model=runs/draft_6m --out=drafts --dtype=int8
    python -m spectr_jax.sample --target=smollm2 --draft=drafts/draft_6m

Without labels on disk, the teacher labels text while the student (eagle3) learns:

    python -m spectr_jax.train --config=configs/distil.py:online --workdir=runs/draft_online \\
        --config.data.train='my_text/train-*' --config.data.heldout="('my_text/heldout-*',)"

The teacher is SmolLM2-135M, unless `label --teacher` names another; labels name their teacher.
The numbers of tokens set the time. On two CPU cores with bfloat16 products the commands above take 8
and 6 minutes; 600 steps are four passes over these labels, so label more text before you train
longer. Online, two cores train on 480 tokens per
second: the 4,000 steps take ten hours, and --config.steps=200 takes half an hour.
"""

from spectr_jax.distillation.config import distil_config, online_config


def get_config(student: str = "6m"):
    return online_config() if student == "online" else distil_config(student)
