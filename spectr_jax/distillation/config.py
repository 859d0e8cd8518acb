"""Fields of distillation configs with their defaults. `configs/distil.py` starts from these."""

from typing import Any

import ml_collections

from spectr_jax.training.config import train_config
from spectr_jax.utils.errors import unknown

STUDENTS: dict[str, dict[str, Any]] = {
    "2m": {
        "layers": 3,
        "width": 128,
        "mlp": 512,
        "heads": 4,
        "kv_heads": 4,
        "head_tokens": 8_192,
        "embed_rank": 96,
    },
    "6m": {
        "layers": 4,
        "width": 256,
        "mlp": 1_024,
        "heads": 4,
        "kv_heads": 4,
        "head_tokens": 8_192,
        "embed_rank": 96,
    },
    "20m": {
        "layers": 3,
        "width": 512,
        "mlp": 1_536,
        "heads": 8,
        "kv_heads": 8,
        "head_tokens": 16_384,
        "embed_rank": 128,
    },
    "eagle": {
        "layers": 1,
        "width": 576,
        "mlp": 1_536,
        "heads": 9,
        "kv_heads": 3,
        "head_tokens": 8_192,
        "embed_rank": 96,
        "features": 576,
    },
}


STUDENTS["eagle3"] = {**STUDENTS["eagle"], "feature_layers": (10, 20)}


"""Shapes of students: the Llama family with about as many parameters outside the embedding as
the paper's drafts, one that sees the features of SmolLM2-135M, and one that sees those of three
of its layers."""


NO_FEATURES: dict[str, Any] = {"features": 0, "feature_layers": ()}


def distil_config(student: str = "6m") -> ml_collections.ConfigDict:
    """Returns the config of a student trained on labels that `spectr_jax.label` wrote, for any
    teacher."""
    if student not in STUDENTS:
        raise unknown("student", student, STUDENTS)
    common = train_config()
    kept = (
        "seed",
        "init",
        "steps",
        "batch_size",
        "accumulate",
        "optimizer",
        "mesh",
        "log_every",
        "eval_every",
    )
    config = ml_collections.ConfigDict(
        {
            **{name: common[name] for name in (*kept, "checkpoint_every", "keep_checkpoints")},
            "teacher": "",  # Of the labels, as `load` takes it; "" for the one that they name.
            "online": False,  # Whether the teacher labels text in each step.
            "teacher_dtype": "bfloat16",  # Precision of online labels.
            "model": {
                **NO_FEATURES,
                **STUDENTS[student],
                "dtype": "bfloat16",
            },  # Fields of `models.llama.LlamaConfig`.
            "data": {
                # Folders of labels with commas between them; online, corpora too.
                "train": "labels/train",
                "shares": (1,),  # Online: shares of a batch, or one number for equal shares.
                "length": 256,  # Online: tokens per row.
                "tfds_dir": "",
                "heldout": (
                    "labels/heldout",
                ),  # Each is scored separately; the first one selects the best checkpoint.
                "heldout_rows": 128,  # Number of first rows of each.
                "streams": 8,
            },
            "loss": "kl",  # One of `distillation.losses.LOSSES`.
            "cross_entropy": 0.0,  # Weight of the cross-entropy of the text's next token.
            "depth": 2,  # Levels of a tree that a student with features learns at once.
        }
    )
    config.update(steps=4_000, batch_size=32, log_every=50, eval_every=500, checkpoint_every=500)
    config.optimizer.update(name="muon", schedule="cosine", warmup_steps=100)
    config.optimizer.learning_rate = {
        "2m": 0.02,
        "6m": 0.015,
        "20m": 0.01,
        "eagle": 0.01,
        "eagle3": 0.01,
    }[student]
    return config


def online_config() -> ml_collections.ConfigDict:
    """Returns the config of a student that sees three layers of SmolLM2-135M, which labels text
    during training."""
    config = distil_config("eagle3")
    config.update(teacher="smollm2", online=True, loss="lk", depth=3, batch_size=16)
    config.data.update(train="my_text/train-*", heldout=("my_text/heldout-*",), heldout_rows=64)
    config.optimizer.update(schedule="constant", learning_rate=0.005)
    return config
