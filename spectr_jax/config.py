"""The fields of every config, with their defaults; `configs/` files start from these.

A config is an `ml_collections.ConfigDict`; a field that is not here is refused by name.
"""

import dataclasses
import hashlib
import json
from typing import Any

import ml_collections
from ml_collections.config_dict import placeholder

from spectr_jax.errors import UserError, unknown
from spectr_jax.models.transformer import LADDER

STUDENTS: dict[str, dict[str, Any]] = {
    "2m": {"layers": 3, "width": 128, "mlp": 512, "heads": 4, "kv_heads": 4, "head_tokens": 8_192, "embed_rank": 96},
    "6m": {"layers": 4, "width": 256, "mlp": 1_024, "heads": 4, "kv_heads": 4, "head_tokens": 8_192, "embed_rank": 96},
    "20m": {"layers": 3, "width": 512, "mlp": 1_536, "heads": 8, "kv_heads": 8, "head_tokens": 16_384, "embed_rank": 128},
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
"""Shapes of the Llama family with about as many parameters, without the embedding, as the paper's drafts; one that sees the
features of SmolLM2-135M, and one that sees those of three of its layers."""

NO_FEATURES: dict[str, Any] = {"features": 0, "feature_layers": ()}


def train_config(model: str = "draft_6m") -> ml_collections.ConfigDict:
    """Returns a training run of one model of the ladder, with the recipe of Flax's LM1B example."""
    if model not in LADDER:
        raise unknown("model", model, LADDER)
    return ml_collections.ConfigDict(
        {
            "seed": 0,
            "init": "",  # Weights to start from, a file (or FOLDER/NAME) that spectr_jax.export wrote; "" for random ones.
            "model": {**dataclasses.asdict(LADDER[model]), "dropout": 0.1},
            "data": {
                "train": "tfds:lm1b:train",
                "heldout": "tfds:lm1b:test",
                "heldout_sentences": 2_000,  # The first ones; a number that one evaluation can afford.
                "tfds_dir": "",
                "tokenizer": "",  # A SentencePiece file to share, trained if not there; "" for `init`'s, or the run's own.
                "tokenizer_sentences": 250_000,
                "streams": 8,  # The corpus is dealt out to so many, or the most that divide that and the batch size.
            },
            "steps": 100_000,
            "batch_size": 256,  # Rows, over all devices.
            "accumulate": 1,  # In so many parts a batch goes through the model.
            "remat": False,  # Compute activations anew in the backward pass, for memory.
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
            "early_exit": {"layer": 0, "weight": 0.5},  # A loss behind the first layers too, for self-speculation.
            "mesh": {"fsdp": 1},
            "log_every": 50,
            "eval_every": 1_000,
            "checkpoint_every": 1_000,
            "keep_checkpoints": 3,
        }
    )


def distil_config(student: str = "6m") -> ml_collections.ConfigDict:
    """Returns a student of any teacher that `load` takes, trained on labels that `spectr_jax.label` wrote."""
    if student not in STUDENTS:
        raise unknown("student", student, STUDENTS)
    common = train_config()
    kept = ("seed", "init", "steps", "batch_size", "accumulate", "optimizer", "mesh", "log_every", "eval_every")
    config = ml_collections.ConfigDict(
        {
            **{name: common[name] for name in (*kept, "checkpoint_every", "keep_checkpoints")},
            "teacher": "",  # Of the labels, as `load` takes it; "" for the one that they name.
            "online": False,  # The teacher labels text in each step; else labels are read.
            "teacher_dtype": "bfloat16",  # In which it does.
            "model": {**NO_FEATURES, **STUDENTS[student], "dtype": "bfloat16"},  # Of `models.llama.LlamaConfig`.
            "data": {
                "train": "labels/train",  # A folder of labels, or several with commas between them; online, corpora too.
                "shares": (1,),  # Online, of a batch, for each of them; one number for equal shares.
                "length": 256,  # Online, tokens a row.
                "tfds_dir": "",
                "heldout": ("labels/heldout",),  # Others, each scored on its own; the first finds the best checkpoint.
                "heldout_rows": 128,  # The first ones of each.
                "streams": 8,
            },
            "loss": "kl",  # One of `distillation.losses.LOSSES`.
            "cross_entropy": 0.0,  # Weight of the text's own next token beside it.
            "depth": 2,  # Of a student that sees features: levels of a tree that it learns at once.
        }
    )
    config.update(steps=4_000, batch_size=32, log_every=50, eval_every=500, checkpoint_every=500)
    config.optimizer.update(name="muon", schedule="cosine", warmup_steps=100)
    config.optimizer.learning_rate = {"2m": 0.02, "6m": 0.015, "20m": 0.01, "eagle": 0.01, "eagle3": 0.01}[student]
    return config


def online_config() -> ml_collections.ConfigDict:
    """Returns a student that sees three layers of SmolLM2-135M, which labels text while the student learns."""
    config = distil_config("eagle3")
    config.update(teacher="smollm2", online=True, loss="lk", depth=3, batch_size=16)
    config.data.update(train="my_text/train-*", heldout=("my_text/heldout-*",), heldout_rows=64)
    config.optimizer.update(schedule="constant", learning_rate=0.005)
    return config


def lm1b_config(model: str) -> ml_collections.ConfigDict:
    """Returns a run of the paper's ladder on an accelerator, with the recipe of Flax's LM1B example.

    AdamW, rsqrt after 1,000 steps of warm-up, weight decay 0.1, dropout 0.1, 100,000 steps of 256 rows of 128 tokens;
    bfloat16 products. All four models share one tokenizer, trained by whichever run comes first.
    """
    config = train_config(model)
    config.model.dtype = "bfloat16"
    config.data.tokenizer = "runs/lm1b/tokenizer.model"
    return config


def open_text_config(model: str) -> ml_collections.ConfigDict:
    """Returns a short run on a few passes of open text, or on less than one: no dropout, bfloat16 products, Muon, a cosine
    to zero.

    The learning rates were tuned with the small models on a CPU; wider models take lower rates.
    """
    config = train_config(model)
    config.model.dropout = 0.0
    config.model.dtype = "bfloat16"
    config.optimizer.name = "muon"
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = {"draft_2m": 0.04, "draft_6m": 0.025, "draft_20m": 0.018, "target_97m": 0.008}[model]
    return config


def decoding_config() -> dict[str, Any]:
    """Returns the fields that all evaluations share: the target, the prompts and the sampling policy."""
    return {
        "target": "embedded:6m",
        "dtype": "float32",
        "prompts": "embedded",  # or a corpus, as in data.train of a training config
        "tfds_dir": "",
        "prompt_tokens": 8,  # Longer prompts are cut to so many tokens after BOS.
        "num_prompts": 1_000,
        "batch_size": 32,
        "max_new_tokens": 64,
        "seeds": (0, 1, 2),
        "temperature": 1.0,
        "draft_temperature": placeholder(float),  # Of the drafts; None for `temperature`.
        "top_k": 0,
        "top_p": 1.0,
    }


def eval_config() -> ml_collections.ConfigDict:
    """Returns an evaluation of tokens per serial call (SpecTr Tables 2 and 4)."""
    return ml_collections.ConfigDict(
        {
            "experiment": "tokens_per_call",
            **decoding_config(),
            "drafts": ("embedded:2m",),
            "num_drafts": (1, 2, 4, 8),
            "draft_lengths": (4, 8),
            "methods": ("spectr", "otm", "otm_block", "otm_layer"),  # For K > 1; at K = 1 speculative decoding.
            "optimal_acceptance": True,  # Tell alpha* too, which takes a second program a row, and a seed's time.
        }
    )


def trees_config() -> ml_collections.ConfigDict:
    """Returns a comparison of all methods at equal numbers of drafted tokens, and ERSD's Figures 3 and 4."""
    return ml_collections.ConfigDict(
        {
            "experiment": "trees",
            **decoding_config(),
            "draft": "embedded:2m",
            "methods": (  # Compared at each N, on the trees that they can draft.
                *("speculative", "block", "naive", "recursive", "kseq_gamma", "spectr", "spectr+", "spectr++", "otm"),
                *("gbv", "gbv_conditional", "otm_block", "otm_layer", "gsd", "traversal", "ersd", "greedy_drafts"),
            ),
            "sizes": (8, 16, 32, 64),  # N, drafted tokens a call.
            "draft_length": 8,  # L of i.i.d. chains, and the most levels of the trees that are searched.
            "extra_trees": ("2,1,1,1,1,1,1,1", "4,2,1,1,1,1,1,1"),  # For i.i.d. drafts, beside chains and the best tree.
            "exit_layer": 1,  # Of self-speculation; 0 for no such row.
        }
    )


def latency_config() -> ml_collections.ConfigDict:
    """Call times (SpecTr Tables 1 and 3), and the phases of a call of some methods."""
    return ml_collections.ConfigDict(
        {
            "experiment": "latency",
            "models": ("random:target_97m", "random:draft_20m", "random:draft_6m", "random:draft_2m"),  # The target first.
            "dtype": "float32",
            "context": 64,  # Committed tokens in the cache.
            "lengths": (4, 8),
            "batch_sizes": (1, 2, 4, 8),
            "runs": 1_000,
            "draft": "random:draft_6m",  # For the phases, which take `lengths` as lengths of drafts.
            "methods": ("spectr", "otm_block", "otm_layer"),
            "num_drafts": 8,
            "phase_batch_sizes": (1, 8),
        }
    )


def quality_config() -> ml_collections.ConfigDict:
    """Returns how well models predict held-out sentences, in each precision used for decoding."""
    return ml_collections.ConfigDict(
        {
            "experiment": "quality",
            "models": ("embedded:2m", "embedded:6m"),
            "dtypes": ("float32", "bfloat16", "int8"),
            "heldout": "tfds:lm1b:test",
            "tfds_dir": "",
            "sentences": 2_000,  # The first ones.
            "batch_size": 32,  # Rows of the models' context.
        }
    )


def auto_config() -> ml_collections.ConfigDict:
    """Returns a search for the fastest method on this machine, for one pair of models."""
    return ml_collections.ConfigDict(
        {
            "experiment": "auto",
            **decoding_config(),
            "draft": "embedded:2m",
            "methods": ("speculative", "block", "spectr", "otm", "otm_block", "otm_layer", "gbv_conditional", "gsd", "ersd"),
            "num_drafts": (1, 2, 4, 8),  # K; the widest prefix trees too.
            "draft_lengths": (1, 2, 3, 4, 6, 8),  # L; the highest trees too.
            "size": 64,  # The most nodes of a tree.
            "tries": 12,  # How many are run besides the baseline.
        }
    )


def spec_bench_config() -> ml_collections.ConfigDict:
    """Spec-Bench: speed over the baseline's, by task, of one conversation at a time."""
    return ml_collections.ConfigDict(
        {
            "experiment": "spec_bench",
            "target": "smollm2",
            "draft": "smollm2-draft",  # Of the methods that need one.
            "dtype": "int8",
            "questions": "",  # Spec-Bench's file, JSON lines.
            "questions_per_task": 0,  # At equal distances; 0 for all.
            "methods": ("lookup chain:4", "block chain:1", "otm_layer 2,1"),  # Compared with the baseline: names and trees.
            "temperatures": (0.0, 1.0),
            "max_new_tokens": 1_024,  # Of an answer.
            "runs": 3,
            "seed": 0,
        }
    )


def check_fields(config: ml_collections.ConfigDict, defaults: ml_collections.ConfigDict, prefix: str = "") -> None:
    """Raises `UserError` if `config` has a field that `defaults` lacks, lacks one, or has one of another type."""
    for name in config:
        if name not in defaults:
            raise unknown("config field", prefix + name, [prefix + known for known in defaults])
    for name, default in defaults.items():
        if name not in config:
            raise UserError(f"config field {prefix + name!r} is missing; the default is {default!r}")
        value = config[name]
        if isinstance(default, ml_collections.ConfigDict):
            if not isinstance(value, ml_collections.ConfigDict):
                raise UserError(f"config field {prefix + name!r} is {value!r}; it must hold {', '.join(default)}")
            check_fields(value, default, f"{prefix}{name}.")
        elif not _same_kind(value, default):
            kind = "number, or None" if default is None else f"{type(default).__name__}, such as {default!r}"
            raise UserError(f"config field {prefix + name!r} is {value!r}; give a {kind}")


def check_positive(config: ml_collections.ConfigDict, *names: str) -> None:
    """Raises `UserError` unless each named field (`a.b` for one inside) is at least 1; tuples are checked by entry."""
    for name in names:
        value: Any = config
        for part in name.split("."):
            value = value[part]
        for entry in value if isinstance(value, tuple | list) else (value,):
            if entry < 1:
                raise UserError(f"config field {name!r} is {entry}; give at least 1")


def to_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the config as plain JSON values."""
    return json.loads(config.to_json())


def config_hash(config: ml_collections.ConfigDict) -> str:
    """Returns twelve hex digits that name the config."""
    return hashlib.sha256(json.dumps(to_json(config), sort_keys=True).encode()).hexdigest()[:12]


def _same_kind(value: Any, default: Any) -> bool:
    if default is None:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, tuple):
        kind = default[0] if default else 0  # A tuple that may be empty is of integers.
        filled = bool(value) or not default
        return isinstance(value, tuple | list) and filled and all(_same_kind(entry, kind) for entry in value)
    return isinstance(value, type(default))
