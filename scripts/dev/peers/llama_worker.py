"""The Llama family in Hugging Face transformers, for compare_architectures.py and compare_llama_cpp.py: JSON lines.

Runs in an environment of its own, of torch and transformers; nothing of spectr_jax is imported.

    {"op": "versions"}                                                 -> {"torch": version, "transformers": version}
    {"op": "make", "name": "qwen3", "folder": folder, "seed": 0}        -> {}
    {"op": "logits", "folder": folder, "tokens": [[...]], "out": file}  -> {}, and float32 [B, N, V] in the .npy file
    {"op": "load", "folder": folder}                                   -> {}
    {"op": "generate", "prompt_tokens": 8, "new_tokens": 64, "threads": 2, "seed": 0} -> {"seconds": ...}
"""

import json
import os
import sys
import time

import numpy as np
import torch
import transformers
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
MODELS = {
    "llama": (LlamaConfig, {"num_key_value_heads": 6}),
    "llama, grouped queries": (LlamaConfig, {}),
    "llama, one key head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama, head width 16": (LlamaConfig, {"head_dim": 16}),
    "llama, llama3 rope": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (LlamaConfig, {"rope_parameters": LINEAR_ROPE}),
    "llama, in bfloat16": (LlamaConfig, {}),
    "llama, in parts": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, tied": (Qwen2Config, {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3, tied": (Qwen3Config, {"head_dim": 8, "tie_word_embeddings": True}),
}
"""Configurations by name, each with what it changes of `SIZES`."""
LOADED: list[transformers.PreTrainedModel] = []


def versions() -> dict:
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "models": list(MODELS),
    }


def make(name: str, folder: str, seed: int) -> dict:
    """Writes a model with `save_pretrained`; all parameters are random, since norms of ones and
    biases of 0 hide errors."""
    kind, changes = MODELS[name]
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(kind(**SIZES | changes))
    with torch.no_grad():
        for own, parameter in model.named_parameters():
            scale = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if "norm" in own else 0.0, scale)
    if "bfloat16" in name:
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="60KB" if "parts" in name else "5GB")
    return {}


def logits(folder: str, tokens: list[list[int]], out: str) -> dict:
    """Those of a whole forward pass in float32, without a cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        np.save(out, model(torch.tensor(tokens), use_cache=False).logits.numpy())
    return {}


def load(folder: str) -> dict:
    """Loads a model to generate with, in float32 on the CPU."""
    LOADED.append(
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    )
    return {}


def generate(prompt_tokens: int, new_tokens: int, threads: int, seed: int) -> dict:
    """Samples a sequence of random tokens on at temperature 1, whatever ends it; `seconds` are
    those of `generate` alone."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    whole = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    config = transformers.GenerationConfig(
        **whole, max_new_tokens=new_tokens, min_new_tokens=new_tokens, use_cache=True
    )
    tokens = torch.randint(100, 10_000, (1, prompt_tokens))
    started = time.perf_counter()
    out = LOADED[-1].generate(
        tokens, generation_config=config, attention_mask=torch.ones_like(tokens)
    )
    seconds = time.perf_counter() - started
    assert out.shape[1] == prompt_tokens + new_tokens
    return {"seconds": seconds}


def main() -> None:
    # Answers only on stdout: what libraries print goes to stderr.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    operations = {
        "versions": versions,
        "make": make,
        "logits": logits,
        "load": load,
        "generate": generate,
    }
    for line in sys.stdin:
        request = json.loads(line)
        answer = operations[request.pop("op")](**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
