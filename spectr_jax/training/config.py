"""Fields of training configs with their defaults. The files in `configs/` start from these."""

import dataclasses

import ml_collections

from spectr_jax.models.transformer import LADDER
from spectr_jax.utils.errors import unknown


def train_config(model: str = "draft_6m") -> ml_collections.ConfigDict:
    """Returns a training config of a ladder model, with the recipe of Flax's LM1B example."""
    if model not in LADDER:
        raise unknown("model", model, LADDER)
    return ml_collections.ConfigDict(
        {
            "seed": 0,
            # A file (or FOLDER/NAME) of weights written by spectr_jax.export; "" for random ones.
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
                # Parallel streams of text; their greatest common divisor with batch_size is used.
                "streams": 8,
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


def lm1b_config(model: str) -> ml_collections.ConfigDict:
    """Returns a run of the paper's ladder on an accelerator, with the recipe of Flax's LM1B
    example and bfloat16 products. All four models share one tokenizer, which the first run
    trains."""
    config = train_config(model)
    config.model.dtype = "bfloat16"
    config.data.tokenizer = "runs/lm1b/tokenizer.model"
    return config


def open_text_config(model: str) -> ml_collections.ConfigDict:
    """Returns a short run on open text: no dropout, bfloat16 products, Muon, a cosine to zero.

    The learning rates were tuned with the small models on a CPU; wider models take lower rates.
    """
    config = train_config(model)
    config.model.update(dropout=0.0, dtype="bfloat16")
    rates = {"draft_2m": 0.04, "draft_6m": 0.025, "draft_20m": 0.018, "target_97m": 0.008}
    config.optimizer.update(name="muon", schedule="cosine", learning_rate=rates[model])
    return config
