"""A draft for any target: a small student that learns the distribution of its teacher.

Students are decoders of the Llama family. 2m, 6m and 20m have about as many parameters outside the
embedding as the paper's drafts. eagle sees the last hidden state of SmolLM2-135M, and eagle3 also
the outputs of two lower layers.

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

from spectr_jax.distillation.config import distil_config
from spectr_jax.utils.errors import unknown

FIELDS = ("layers", "width", "mlp", "heads", "kv_heads", "head_tokens", "embed_rank")
SHAPES = {
    "2m": (3, 128, 512, 4, 4, 8_192, 96),
    "6m": (4, 256, 1_024, 4, 4, 8_192, 96),
    "20m": (3, 512, 1_536, 8, 8, 16_384, 128),
    "eagle": (1, 576, 1_536, 9, 3, 8_192, 96),
    "eagle3": (1, 576, 1_536, 9, 3, 8_192, 96),
}
FEATURES = {"eagle": {"features": 576}, "eagle3": {"features": 576, "feature_layers": (10, 20)}}
RATES = {"2m": 0.02, "6m": 0.015, "20m": 0.01, "eagle": 0.01, "eagle3": 0.01}


def get_config(student: str = "6m"):
    if student == "online":
        return _online()
    if student not in SHAPES:
        raise unknown("student", student, SHAPES)
    config = distil_config()
    config.model.update(dict(zip(FIELDS, SHAPES[student], strict=True)), dtype="bfloat16")
    config.model.update(FEATURES.get(student, {}))
    config.data.update(train="labels/train", heldout=("labels/heldout",))
    config.update(loss="kl", depth=2, batch_size=32, steps=4_000)
    config.optimizer.update(name="muon", b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1, clip_norm=1.0)
    config.optimizer.update(schedule="cosine", learning_rate=RATES[student], warmup_steps=100)
    return config


def _online():
    """An eagle3 whose teacher labels text in each step."""
    config = get_config("eagle3")
    config.update(teacher="smollm2", online=True, teacher_dtype="bfloat16")
    config.data.update(train="my_text/train-*", heldout=("my_text/heldout-*",), heldout_rows=64)
    config.update(loss="lk", depth=3, batch_size=16)
    config.optimizer.update(schedule="constant", learning_rate=0.005)
    return config
