"""Fields of training configs with their defaults. The files in `configs/` start from these."""

import dataclasses

import ml_collections

from spectr_jax.models.transformer import LADDER
from spectr_jax.utils.errors import unknown


def train_config(model: str = "draft_6m") -> ml_collections.ConfigDict:
    """Returns a training config for one model of the ladder, with the recipe of Flax's LM1B
    example."""
    if model not in LADDER:
        raise unknown("model", model, LADDER)
    return ml_collections.ConfigDict(
        {
            "seed": 0,
            # Initial weights: a file (or FOLDER/NAME) written by spectr_jax.export; "" for random
            # ones.
            "init": "",
            "model": {**dataclasses.asdict(LADDER[model]), "dropout": 0.1},
            "data": {
                "train": "tfds:lm1b:train",
                "heldout": "tfds:lm1b:test",
                "heldout_sentences": 2_000,  # The first ones, as many as one evaluation can afford.
                "tfds_dir": "",
                # A SentencePiece file to share, trained if missing; "" for `init`'s or the run's
                # own.
                "tokenizer": "",
                "tokenizer_sentences": 250_000,
                "streams": 8,  # At most this many; a divisor of this and of the batch size is used.
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
            "early_exit": {
                "layer": 0,
                "weight": 0.5,
            },  # An additional loss after the first layers, for self-speculation.
            "mesh": {"fsdp": 1},
            "log_every": 50,
            "eval_every": 1_000,
            "checkpoint_every": 1_000,
            "keep_checkpoints": 3,
        }
    )


def lm1b_config(model: str) -> ml_collections.ConfigDict:
    """Returns a run of the paper's ladder on an accelerator, with the recipe of Flax's LM1B
    example.

    AdamW, rsqrt after 1,000 steps of warm-up, weight decay 0.1, dropout 0.1, 100,000 steps of
    256 rows of 128 tokens, bfloat16 products. All four models share one tokenizer, which the
    first run trains.
    """
    config = train_config(model)
    config.model.dtype = "bfloat16"
    config.data.tokenizer = "runs/lm1b/tokenizer.model"
    return config


def open_text_config(model: str) -> ml_collections.ConfigDict:
    """Returns a short run on open text: no dropout, bfloat16 products, Muon, a cosine to zero.

    The learning rates were tuned with the small models on a CPU; wider models take lower rates.
    """
    config = train_config(model)
    config.model.dropout = 0.0
    config.model.dtype = "bfloat16"
    config.optimizer.name = "muon"
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = {
        "draft_2m": 0.04,
        "draft_6m": 0.025,
        "draft_20m": 0.018,
        "target_97m": 0.008,
    }[model]
    return config
