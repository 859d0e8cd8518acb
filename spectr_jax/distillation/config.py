"""Fields of distillation configs with their defaults. `configs/distil.py` starts from these."""

import ml_collections

from spectr_jax.training.config import train_config
from spectr_jax.utils.errors import unknown

_FIELDS = (
    *("layers", "width", "mlp", "heads", "kv_heads"),
    *("head_tokens", "embed_rank", "features", "feature_layers"),
)
_SHAPES = {
    "2m": (3, 128, 512, 4, 4, 8_192, 96, 0, ()),
    "6m": (4, 256, 1_024, 4, 4, 8_192, 96, 0, ()),
    "20m": (3, 512, 1_536, 8, 8, 16_384, 128, 0, ()),
    "eagle": (1, 576, 1_536, 9, 3, 8_192, 96, 576, ()),
    "eagle3": (1, 576, 1_536, 9, 3, 8_192, 96, 576, (10, 20)),
}
STUDENTS = {name: dict(zip(_FIELDS, shape, strict=True)) for name, shape in _SHAPES.items()}
"""Shapes of students, of the Llama family. Three have about as many parameters outside the
embedding as the paper's drafts. `eagle` sees the last hidden state of SmolLM2-135M, and `eagle3`
also the outputs of two lower layers."""
LEARNING_RATES = {"2m": 0.02, "6m": 0.015, "20m": 0.01, "eagle": 0.01, "eagle3": 0.01}


def distil_config(student: str = "6m") -> ml_collections.ConfigDict:
    """Returns the config of a student that learns from labels that `spectr_jax.label` wrote."""
    if student not in STUDENTS:
        raise unknown("student", student, STUDENTS)
    common = train_config()
    kept = ["seed", "init", "steps", "batch_size", "accumulate", "optimizer", "mesh"]
    kept += ["log_every", "eval_every", "checkpoint_every", "keep_checkpoints"]
    config = ml_collections.ConfigDict(
        {
            **{name: common[name] for name in kept},
            "teacher": "",  # As `load` takes it; "" for the one that the labels name.
            "online": False,  # Whether the teacher labels text in each step.
            "teacher_dtype": "bfloat16",  # Precision of online labels.
            # Fields of `models.llama.LlamaConfig`.
            "model": {**STUDENTS[student], "dtype": "bfloat16"},
            "data": {
                # Folders of labels with commas between them; online, corpora too.
                "train": "labels/train",
                "shares": (1,),  # Online: shares of a batch, or one number for equal shares.
                "length": 256,  # Online: tokens per row.
                "tfds_dir": "",
                # Each set is scored separately; the first one selects the best checkpoint.
                "heldout": ("labels/heldout",),
                "heldout_rows": 128,  # Scores this many rows of each set, from the first.
                "streams": 8,
            },
            "loss": "kl",  # One of `distillation.losses.LOSSES`.
            "cross_entropy": 0.0,  # Weight of the cross-entropy of the text's next token.
            "depth": 2,  # Drafts in a row for which a student with features is trained.
        }
    )
    config.update(steps=4_000, batch_size=32, log_every=50, eval_every=500, checkpoint_every=500)
    config.optimizer.update(name="muon", schedule="cosine", warmup_steps=100)
    config.optimizer.learning_rate = LEARNING_RATES[student]
    return config


def online_config() -> ml_collections.ConfigDict:
    """Returns the config of a student that sees three layers of SmolLM2-135M. The teacher labels
    text in each training step."""
    config = distil_config("eagle3")
    config.update(teacher="smollm2", online=True, loss="lk", depth=3, batch_size=16)
    config.data.update(train="my_text/train-*", heldout=("my_text/heldout-*",), heldout_rows=64)
    config.optimizer.update(schedule="constant", learning_rate=0.005)
    return config
