"""Fields of training configs. Their values here are frozen: older runs that lack one rely on it."""

import dataclasses

import ml_collections

from spectr_jax.models.formats.runs import LANGUAGE_MODEL
from spectr_jax.models.transformer import LADDER
from spectr_jax.utils.errors import unknown


def train_config(model: str = "draft_6m") -> ml_collections.ConfigDict:
    """Returns a training config of a ladder model, with all fields. The files in `configs/` set
    those that make a recipe."""
    if model not in LADDER:
        raise unknown("model", model, LADDER)
    return ml_collections.ConfigDict(
        {
            "kind": LANGUAGE_MODEL,
            "seed": 0,
            # A published model such as "6m", or a file (or FOLDER/NAME) of weights written by
            # spectr_jax.export; "" for random ones.
            "init": "",
            "model": {**dataclasses.asdict(LADDER[model]), "dropout": 0.1},
            "data": {
                "train": "tfds:lm1b:train",
                "heldout": "tfds:lm1b:test",
                "heldout_sentences": 2_000,  # Evaluates on this many, from the first.
                "tfds_dir": "",
                # A SentencePiece file, trained if missing. "" for the one next to `init`, or for
                # tokenizer.model of the workdir.
                "tokenizer": "",
                "tokenizer_sentences": 250_000,
            },
            "steps": 100_000,
            "batch_size": 256,  # Rows, over all devices.
            "accumulate": 1,  # Number of parts in which a batch is processed.
            "remat": False,  # Recompute activations in the backward pass to save memory.
            "optimizer": {
                "name": "adamw",  # or "muon"
                "schedule": "rsqrt",
                "learning_rate": 0.0016,
                "warmup_steps": 1_000,
                "weight_decay": 0.1,
                "b1": 0.9,
                "b2": 0.98,
                "eps": 1e-9,
                "clip_norm": 1.0,
            },
            # An additional loss after the first layers, for self-speculation; layer 0 for none.
            "early_exit": {"layer": 0, "weight": 0.5},
            "mesh": {"fsdp": 1},
            "log_every": 50,
            "eval_every": 1_000,
            "checkpoint_every": 1_000,
            "keep_checkpoints": 3,
        }
    )
