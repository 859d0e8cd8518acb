"""Fields of evaluation configs with their defaults. The files in `configs/` start from these."""

from typing import Any

import ml_collections
from ml_collections.config_dict import placeholder


def decoding_config() -> dict[str, Any]:
    """Returns the fields that all evaluations share: target, prompts and sampling policy."""
    return {
        "target": "6m",
        "dtype": "float32",
        "model_parallel": 1,  # Devices over which the target's weights are split.
        "prompts": "embedded",  # Or a corpus, as in data.train of a training config.
        "tfds_dir": "",
        "prompt_tokens": 8,  # Longer prompts are cut to this many tokens after BOS.
        "num_prompts": 1_000,
        "batch_size": 32,
        "max_new_tokens": 64,
        "seeds": (0, 1, 2),
        "temperature": 1.0,
        "draft_temperature": placeholder(float),  # None for the value of `temperature`.
        "top_k": 0,
        "top_p": 1.0,
    }


def eval_config() -> ml_collections.ConfigDict:
    """Returns the config of tokens per serial call (SpecTr, Tables 2 and 4)."""
    return _config(
        "tokens_per_call",
        decoding_config(),
        drafts=("2m",),
        num_drafts=(1, 2, 4, 8),
        draft_lengths=(4, 8),
        # For K > 1. K = 1 is speculative decoding.
        methods=("spectr", "otm", "otm_block", "otm_layer"),
        # Also reports alpha*, which takes a second program per row and the time of one seed.
        optimal_acceptance=True,
    )


def trees_config() -> ml_collections.ConfigDict:
    """Returns the config of all methods at equal numbers of drafted tokens, and of ERSD's
    Figures 3 and 4."""
    return _config(
        "trees",
        decoding_config(),
        draft="2m",
        # Each N compares these on the trees that they can draft.
        methods=(
            *("speculative", "block", "naive", "recursive", "spectr", "spectr+"),
            *("spectr++", "otm", "gbv", "gbv_conditional", "otm_block", "otm_layer", "gsd"),
            *("traversal", "traversal_iid", "ersd", "greedy_drafts"),
        ),
        sizes=(8, 16, 32, 64),  # N, drafted tokens per call.
        draft_length=8,  # L of i.i.d. chains, and the largest height of searched trees.
        # For i.i.d. drafts, in addition to chains and the best tree.
        extra_trees=("2,1,1,1,1,1,1,1", "4,2,1,1,1,1,1,1"),
        exit_layer=1,  # For self-speculation; 0 omits this row.
    )


def frontier_config() -> ml_collections.ConfigDict:
    """Returns the config of methods on the same i.i.d. drafts, which branch once."""
    fields = decoding_config()
    del fields["temperature"], fields["top_p"]
    return _config(
        "frontier",
        fields,
        draft="2m",
        # The choices of the first one continue the sequences.
        methods=(
            *("spectr", "recursive", "naive", "otm", "otm_block", "traversal_iid", "gbv"),
            "otm_layer",
        ),
        paths=(2, 3, 4),  # K.
        draft_length=8,  # L, of each path.
        stems=(0, 1, 2, 4),  # Tokens that all paths share.
        policies=((1.0, 1.0), (0.6, 1.0), (1.0, 0.9)),  # Temperature and top-p.
        contexts=16,  # Prompts of the comparison with the optimum.
        calls=10_000,  # Simulated for each of them and each method.
    )


def latency_config() -> ml_collections.ConfigDict:
    """Returns the config of call times (SpecTr, Tables 1 and 3) and of the phases of a call."""
    return _config(
        "latency",
        # The target comes first.
        models=("random:target_97m", "random:draft_20m", "random:draft_6m", "random:draft_2m"),
        dtype="float32",
        context=64,  # Committed tokens in the cache.
        lengths=(4, 8),
        batch_sizes=(1, 2, 4, 8),
        runs=1_000,
        draft="random:draft_6m",  # For the phases, which use `lengths` as draft lengths.
        methods=("spectr", "otm_block", "otm_layer"),
        num_drafts=8,
        phase_batch_sizes=(1, 8),
    )


def quality_config() -> ml_collections.ConfigDict:
    """Returns the config of bits per character on held-out sentences, in each decoding
    precision."""
    return _config(
        "quality",
        models=("2m", "6m"),
        dtypes=("float32", "bfloat16", "int8"),
        heldout="tfds:lm1b:test",
        tfds_dir="",
        sentences=2_000,  # The first sentences of `heldout`.
        batch_size=32,  # Rows of the models' context.
    )


def auto_config() -> ml_collections.ConfigDict:
    """Returns the config of the fastest method on this machine, for one pair of models."""
    return _config(
        "auto",
        decoding_config(),
        draft="2m",
        # Compared with the baseline; names and trees.
        candidates=(
            *("speculative chain:2", "speculative chain:4"),
            *("block chain:1", "block chain:2", "block chain:3", "block chain:4"),
            *("otm_block 2,1", "otm_block 2,1,1"),
            *("otm_layer 2,1", "otm_layer 2,1,1", "otm_layer 4x4", "spectr 4x4"),
        ),
    )


def figures_config() -> ml_collections.ConfigDict:
    """Returns the config of the papers' figures on acceptance."""
    return _config(
        "figures",
        only=("",),  # Names of figures; an empty name stands for all.
        # SpecTr's Figure 5 compares these two models after this prompt.
        target="6m",
        draft="2m",
        prompt="He said he also has asked prosecutors to",
        draws=20_000,  # Choices per measured point.
        pairs=100,  # Random pairs of distributions in SpecTr++'s figures.
        seed=0,  # Of the random pairs and the measured points.
    )


def spec_bench_config() -> ml_collections.ConfigDict:
    """Returns the config of Spec-Bench: speedup by task, one conversation at a time."""
    return _config(
        "spec_bench",
        target="smollm2",
        draft="smollm2-draft",  # For the methods that need one.
        table="smollm2-bigram",  # For `recycle`; "" for none.
        dtype="int8",
        questions="",  # Spec-Bench's file, JSON lines.
        questions_per_task=0,  # Evenly spaced questions of each task; 0 for all.
        methods=("lookup chain:2", "recycle recall:5", "block chain:1"),  # Names and trees.
        temperatures=(0.0, 1.0),
        max_new_tokens=1_024,  # Per answer.
        runs=3,
        seed=0,
    )


def _config(experiment: str, *shared: dict[str, Any], **fields: Any) -> ml_collections.ConfigDict:
    return ml_collections.ConfigDict({"experiment": experiment, **dict(*shared), **fields})
