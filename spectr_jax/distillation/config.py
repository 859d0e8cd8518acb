"""Fields of distillation configs. Their values here are frozen: older runs that lack one rely on it."""

import ml_collections

from spectr_jax.models.formats.runs import DRAFT_STUDENT
from spectr_jax.training.config import train_config


def distil_config() -> ml_collections.ConfigDict:
    """Returns a distillation config with all fields. configs/distil.py sets those that make a
    recipe."""
    common = train_config()
    kept = ["seed", "init", "accumulate", "optimizer", "mesh", "keep_checkpoints"]
    config = ml_collections.ConfigDict(
        {
            **{name: common[name] for name in kept},
            "kind": DRAFT_STUDENT,
            "teacher": "",  # As `load` takes it; "" for the one that the labels name.
            "online": False,  # Whether the teacher labels text in each step.
            "teacher_dtype": "bfloat16",  # Precision of online labels.
            # Fields of `models.llama.LlamaConfig`.
            "model": {
                "layers": 4,
                "width": 256,
                "mlp": 1_024,
                "heads": 4,
                "kv_heads": 4,
                "head_tokens": 8_192,  # Most frequent tokens that the head scores; 0 for all.
                "embed_rank": 96,  # Width of the embedding table; 0 for that of the model.
                "features": 0,  # Width of the teacher's hidden states that it sees; 0 if none.
                "feature_layers": (),  # Teacher layers that it sees besides the last.
                "dtype": "bfloat16",
            },
            "data": {
                # Folders of labels with commas between them; online, corpora too. Labels are at
                # temperature 1: `label --temperature` and `--seed` are for what the teacher writes.
                "train": "labels/train",
                "shares": (1,),  # Online: shares of a batch, or one number for equal shares.
                "length": 256,  # Online: tokens per row.
                "tfds_dir": "",
                # Each set is scored separately; the first one selects the best checkpoint.
                "heldout": ("labels/heldout",),
                "heldout_rows": 128,  # Scores this many rows of each set, from the first.
            },
            "loss": "kl",  # One of `distillation.losses.LOSSES`.
            "cross_entropy": 0.0,  # Weight of that loss (of the text's next token) besides `loss`.
            "depth": 2,  # Drafts in a row for which a student with features is trained.
            "steps": 4_000,
            "batch_size": 32,
            "log_every": 50,
            "eval_every": 500,
            "checkpoint_every": 500,
        }
    )
    config.optimizer.update(name="muon", schedule="cosine", warmup_steps=100, learning_rate=0.015)
    return config
