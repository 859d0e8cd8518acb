"""Records outputs of tiny models of transformers, with which tests compare ours.

    python -m venv references && references/bin/pip install -r requirements-references.txt
    references/bin/python scripts/dev/references.py    # a minute; rewrites tests/references

The tests do not need torch: a file has a model's config.json, the names and shapes of its tensors,
and what the model returns. Values of tensors follow from their names (tests/references/weights.py).
"""

import json
import pathlib
import runpy
from typing import Any

import numpy as np
import safetensors.numpy

FOLDER = pathlib.Path(__file__).parents[2] / "tests" / "references"
weight = runpy.run_path(str(FOLDER / "weights.py"))["weight"]
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
    "gemma": {"model_type": "gemma", **SMALL, "tie_word_embeddings": True},
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
        "rope_scaling": {
            **YARN,
            "beta_fast": 8,
            "attention_factor": 1.3,
            "original_max_position_embeddings": 64,
        },
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


WORDS = """
a small draft model proposes several tokens and a large target model scores all of them in one call so that
the text which comes out follows the distribution of the large model exactly whatever the draft was
"""
"""Text for the tokenizer and the prompts."""


def write(name: str, folder: pathlib.Path, field: str = "config") -> dict[str, Any]:
    """Writes the folder of a recorded model, and returns what was recorded.

    Args:
      name: of the model.
      folder: made if it does not exist.
      field: "config" for config.json in the older form, "newer_config" for that of transformers 5.
    """
    recorded = dict(np.load(FOLDER / f"{name}.npz"))
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.json": str(recorded[field]), **json.loads(str(recorded.get("files", "{}")))}
    for file, content in files.items():
        (folder / file).write_text(content)
    shapes = json.loads(str(recorded["shapes"]))
    tensors = {each: weight(each, tuple(shape)) for each, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return recorded


def prompt(vocab_size: int) -> np.ndarray:
    """Returns the tokens [TOKENS] of the prompt."""
    return np.random.default_rng(0).integers(3, vocab_size, TOKENS)


def built(config: dict[str, Any]):
    """Returns a model of transformers, and its tensors by name."""
    import torch
    import transformers

    fields = {name: value for name, value in config.items() if name != "model_type"}
    made = transformers.AutoConfig.for_model(config["model_type"], **fields)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    state = model.state_dict()
    if made.tie_word_embeddings:
        state.pop("lm_head.weight")
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(torch.tensor(weight(name, tuple(tensor.shape))))
    return model, state


def greedy(model, tokens) -> np.ndarray:
    """Returns the ANSWER most probable tokens that follow `tokens` [1, N]."""
    out = model.generate(
        tokens, max_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[0, tokens.shape[1] :].numpy().astype(np.int32)


def of_logits(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what a file has for one model: logits and a greedy continuation."""
    import torch

    model, state = built(config)
    tokens = torch.tensor(prompt(model.config.vocab_size))[None]
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0].numpy()
    return {
        "config": json.dumps(config),
        "newer_config": json.dumps(model.config.to_dict(), default=str),
        "shapes": json.dumps({name: list(tensor.shape) for name, tensor in state.items()}),
        "logits": logits,
        "greedy": greedy(model, tokens),
    }


def tokenizer_files() -> dict[str, str]:
    """Returns the files of a tokenizer in the format of Gemma's, trained on words of this script."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    begin = [("<bos>", 2)]
    made.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begin)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    by_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=460, special_tokens=[*special, *by_byte])
    made.train_from_iterator([" ".join(WORDS.split()[i:]) for i in range(12)], trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]
    template = (
        "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ 'model' if message.role == "
        "'assistant' else message.role }}\n{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": True,
        **{f"{name}_token": f"<{name}>" for name in ("bos", "eos", "unk", "pad")},
        "chat_template": template,
    }
    return {
        "tokenizer.json": json.dumps(content),
        "tokenizer_config.json": json.dumps(settings),
        "generation_config.json": json.dumps({"bos_token_id": 2, "eos_token_id": [1, 5]}),
    }


def of_texts(config: dict[str, Any]) -> dict[str, Any]:
    """Returns what a file has for a model with a tokenizer: greedy text after twenty prompts."""
    import tempfile

    import transformers

    files, words = tokenizer_files(), WORDS.split()
    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            (pathlib.Path(folder) / file).write_text(content)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = {**config, "vocab_size": len(tokenizer)}
    model, state = built(config)
    prompts = [
        " ".join(words[i : i + 2 + i % 9]) + ["", ".", " \n", "  7"][i % 4] for i in range(20)
    ]
    tokens = [tokenizer(text, return_tensors="pt").input_ids for text in prompts]
    chat = [{"role": "user", "content": prompts[0]}]
    return {
        "config": json.dumps(config),
        "files": json.dumps(files),
        "shapes": json.dumps({name: list(tensor.shape) for name, tensor in state.items()}),
        "prompts": json.dumps(prompts),
        "tokens": json.dumps([each[0].tolist() for each in tokens]),
        "chat": json.dumps(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        ),
        "greedy": np.stack([greedy(model, each) for each in tokens]),
        "texts": json.dumps(
            [tokenizer.decode(greedy(model, each), skip_special_tokens=True) for each in tokens]
        ),
    }


def main() -> None:
    """Writes all files."""
    FOLDER.mkdir(exist_ok=True)
    contents = {name: of_logits(config) for name, config in MODELS.items()}
    contents["gemma3_with_tokenizer"] = of_texts(MODELS["gemma3"])
    for name, content in contents.items():
        np.savez_compressed(FOLDER / f"{name}.npz", **content)
        print(f"{name}: {(FOLDER / f'{name}.npz').stat().st_size} bytes")


if __name__ == "__main__":
    main()
