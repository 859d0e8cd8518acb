"""Fields of evaluation configs with their defaults. The files in `configs/` start from these."""

from typing import Any

import ml_collections
from ml_collections.config_dict import placeholder


def decoding_config() -> dict[str, Any]:
    """Returns the fields that all evaluations share: target, prompts and sampling policy."""
    return {
        "target": "6m",
        "dtype": "float32",
        "prompts": "embedded",  # or a corpus, as in data.train of a training config
        "tfds_dir": "",
        "prompt_tokens": 8,  # Longer prompts are cut to this many tokens after BOS.
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
    """Returns the config of tokens per serial call (SpecTr Tables 2 and 4)."""
    return ml_collections.ConfigDict(
        {
            "experiment": "tokens_per_call",
            **decoding_config(),
            "drafts": ("2m",),
            "num_drafts": (1, 2, 4, 8),
            "draft_lengths": (4, 8),
            "methods": (
                "spectr",
                "otm",
                "otm_block",
                "otm_layer",
            ),  # For K > 1. K = 1 is speculative decoding.
            # Also report alpha*, which takes a second program per row and the time of one seed.
            "optimal_acceptance": True,
        }
    )


def trees_config() -> ml_collections.ConfigDict:
    """Returns the config of all methods at equal numbers of drafted tokens, and of ERSD's
    Figures 3 and 4."""
    return ml_collections.ConfigDict(
        {
            "experiment": "trees",
            **decoding_config(),
            "draft": "2m",
            "methods": (  # Compared at each N on the trees that they can draft.
                *(
                    "speculative",
                    "block",
                    "naive",
                    "recursive",
                    "kseq_gamma",
                    "spectr",
                    "spectr+",
                    "spectr++",
                    "otm",
                ),
                *(
                    "gbv",
                    "gbv_conditional",
                    "otm_block",
                    "otm_layer",
                    "gsd",
                    "traversal",
                    "ersd",
                    "greedy_drafts",
                ),
            ),
            "sizes": (8, 16, 32, 64),  # N, drafted tokens per call.
            "draft_length": 8,  # L of i.i.d. chains, and the largest height of searched trees.
            "extra_trees": (
                "2,1,1,1,1,1,1,1",
                "4,2,1,1,1,1,1,1",
            ),  # For i.i.d. drafts, in addition to chains and the best tree.
            "exit_layer": 1,  # For self-speculation; 0 omits this row.
        }
    )


def latency_config() -> ml_collections.ConfigDict:
    """Returns the config of call times (SpecTr Tables 1 and 3) and of the phases of a call."""
    return ml_collections.ConfigDict(
        {
            "experiment": "latency",
            "models": (
                "random:target_97m",
                "random:draft_20m",
                "random:draft_6m",
                "random:draft_2m",
            ),  # The target comes first.
            "dtype": "float32",
            "context": 64,  # Committed tokens in the cache.
            "lengths": (4, 8),
            "batch_sizes": (1, 2, 4, 8),
            "runs": 1_000,
            "draft": "random:draft_6m",  # For the phases, which use `lengths` as draft lengths.
            "methods": ("spectr", "otm_block", "otm_layer"),
            "num_drafts": 8,
            "phase_batch_sizes": (1, 8),
        }
    )


def quality_config() -> ml_collections.ConfigDict:
    """Returns the config of bits per character on held-out sentences, in each decoding
    precision."""
    return ml_collections.ConfigDict(
        {
            "experiment": "quality",
            "models": ("2m", "6m"),
            "dtypes": ("float32", "bfloat16", "int8"),
            "heldout": "tfds:lm1b:test",
            "tfds_dir": "",
            "sentences": 2_000,  # Number of first sentences.
            "batch_size": 32,  # Rows of the models' context.
        }
    )


def auto_config() -> ml_collections.ConfigDict:
    """Returns the config of a search for the fastest method on this machine, for one pair of
    models."""
    return ml_collections.ConfigDict(
        {
            "experiment": "auto",
            **decoding_config(),
            "draft": "2m",
            "methods": (
                "speculative",
                "block",
                "spectr",
                "otm",
                "otm_block",
                "otm_layer",
                "gbv_conditional",
                "gsd",
                "ersd",
            ),
            "num_drafts": (1, 2, 4, 8),  # K, and the largest width of prefix trees.
            "draft_lengths": (1, 2, 3, 4, 6, 8),  # L, and the heights of trees.
            "size": 64,  # Largest number of nodes of a tree.
            "tries": 12,  # Number of candidates to run besides the baseline.
        }
    )


def figures_config() -> ml_collections.ConfigDict:
    """Returns the config of the papers' figures on acceptance."""
    return ml_collections.ConfigDict(
        {
            "experiment": "figures",
            "only": ("",),  # Names of figures; an empty name stands for all.
            "target": "6m",  # Of SpecTr's Figure 5, as are `draft` and `prompt`.
            "draft": "2m",
            "prompt": "He said he also has asked prosecutors to",
            "draws": 20_000,  # Choices per measured point.
            "pairs": 100,  # Random pairs of distributions in SpecTr++'s figures.
            "seed": 0,  # Of the random pairs and the measured points.
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
            "methods": (
                "lookup chain:2",
                "block chain:1",
                "otm_layer 2,1",
            ),  # Compared with the baseline: names and trees.
            "temperatures": (0.0, 1.0),
            "max_new_tokens": 1_024,  # Of an answer.
            "runs": 3,
            "seed": 0,
        }
    )
