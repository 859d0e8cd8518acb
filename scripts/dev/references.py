"""Records outputs of tiny models of transformers, with which tests compare ours.

    python -m venv /tmp/references && /tmp/references/bin/pip install -r requirements-references.txt
    /tmp/references/bin/python scripts/dev/references.py    # one minute; rewrites tests/references

The tests need neither torch nor transformers: a file has a model's config.json, the names and shapes of
its tensors, and what the model returns. Values of tensors follow from their names (`weight`).
"""

import json
import pathlib
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

FOLDER = pathlib.Path(__file__).parents[2] / "tests" / "references"
TOKENS, ANSWER = 40, 12
"""Number of tokens of a prompt, and of its greedy continuation."""
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
GEMMA = {**SMALL, "tie_word_embeddings": True, "sliding_window": 6, "query_pre_attn_scalar": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 4.0, 8.0],
    "original_max_position_embeddings": 56,
    "partial_rotary_factor": 0.75,
    "rope_theta": 10_000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma", **GEMMA, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        **GEMMA,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GEMMA,
        "num_hidden_layers": 7,
        "rope_scaling": LINEAR,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        **GEMMA,
        "num_hidden_layers": 6,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
    },
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": 6},
    "qwen2": {
        "model_type": "qwen2",
        **SMALL,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "qwen3": {"model_type": "qwen3", **SMALL, "rope_scaling": {**YARN, "rope_theta": 1e6}},
    "llama_yarn": {
        "model_type": "llama",
        **SMALL,
        "rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 2, "attention_factor": 1.3},
    },
    "llama_dynamic": {
        "model_type": "llama",
        **SMALL,
        "rope_scaling": {**LINEAR, "rope_type": "dynamic"},
    },
    "phi3": {"model_type": "phi3", **SMALL, "sliding_window": 9},
    "phi3_long": {
        "model_type": "phi3",
        **SMALL,
        "rope_scaling": LONG,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 56,
    },
}
"""The config.json of each model, in the older form that published files have."""


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a tensor in float32 whose values follow from its name.

    They are such that scores, caps and windows matter: with small weights all logits are alike.
    """
    normal = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    scale = 0.3 if len(shape) == 1 else 2 / np.sqrt(shape[-1])
    return (normal * scale + (name.endswith("layer_scalar"))).astype(np.float32)


def prompt(vocab_size: int) -> np.ndarray:
    """Returns the tokens [TOKENS] of the prompt."""
    return np.random.default_rng(0).integers(3, vocab_size, TOKENS)


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what a file has for one model."""
    import torch
    import transformers

    kind, fields = config["model_type"], {k: v for k, v in config.items() if k != "model_type"}
    made = transformers.AutoConfig.for_model(kind, **fields, attn_implementation="eager")
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(
            made, attn_implementation="eager"
        ).eval()
        state = model.state_dict()
        if made.tie_word_embeddings:
            state.pop("lm_head.weight")
        for name, tensor in state.items():
            tensor.copy_(torch.tensor(weight(name, tuple(tensor.shape))))
        tokens = torch.tensor(prompt(made.vocab_size))[None]
        ran = model(tokens, output_hidden_states=True, use_cache=False)
        greedy = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=ANSWER,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    return {
        "config": json.dumps(config),
        "newer_config": json.dumps(made.to_dict(), default=str),
        "shapes": json.dumps(shapes),
        "logits": ran.logits[0].numpy(),
        "greedy": greedy[0, TOKENS:].numpy().astype(np.int32),
    }


def recorded() -> Iterator[tuple[str, dict[str, Any]]]:
    """Returns an iterator over the name and the contents of each file."""
    for name, config in MODELS.items():
        yield name, run(config)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, contents in recorded():
        np.savez_compressed(FOLDER / f"{name}.npz", **contents)
        print(
            f"{name}: {(FOLDER / f'{name}.npz').stat().st_size} bytes, greedy {contents['greedy'][:6]}"
        )


if __name__ == "__main__":
    main()
