"""Our decoders in Hugging Face's GPT-2 layout, so that other programs can run the same weights."""

import os
import pathlib
from typing import Any

import numpy as np
import safetensors.numpy

from spectr_jax.files import write_json
from spectr_jax.models.transformer import Block, Transformer, TransformerConfig, sinusoidal_table


def save_gpt2(folder: pathlib.Path, model: Transformer) -> None:
    """Writes a GPT-2 checkpoint in float32: config.json and model.safetensors, each whole or not at all.

    GPT-2's head has no bias and ours has one: it goes into a tensor `lm_head.bias`, which GPT-2 classes ignore. Whoever
    wants our logits puts a linear layer with that bias in the head's place.

    Args:
      folder: made if it is not there.
      model: what to write.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    safetensors.numpy.save_file(gpt2_tensors(model), partial, {"format": "pt"})  # transformers reads no other format.
    partial.replace(path)
    write_json(folder / "config.json", gpt2_config(model.config))


def gpt2_config(config: TransformerConfig) -> dict[str, Any]:
    """Hugging Face's config of a decoder of this shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.mlp,
        "activation_function": "gelu_new",  # The tanh approximation, which is JAX's gelu.
        "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": False,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def gpt2_tensors(model: Transformer) -> dict[str, np.ndarray]:
    """Float32 tensors by Hugging Face's names."""
    tensors = {
        "transformer.wte.weight": _float32(model.embed.embedding),
        "transformer.wpe.weight": sinusoidal_table(model.config.context, model.config.width),
        **_norm("transformer.ln_f", model.norm),
        "lm_head.weight": np.ascontiguousarray(_float32(model.head.kernel).T),
        "lm_head.bias": _float32(model.head.bias),
    }
    for layer, block in enumerate(model.blocks):
        tensors |= {f"transformer.h.{layer}.{name}": tensor for name, tensor in _block_tensors(block).items()}
    return tensors


def _block_tensors(block: Block) -> dict[str, np.ndarray]:
    return {
        **_norm("ln_1", block.norm_attention),
        **_conv1d("attn.c_attn", block.qkv),
        **_conv1d("attn.c_proj", block.out),
        **_norm("ln_2", block.norm_mlp),
        **_conv1d("mlp.c_fc", block.up),
        **_conv1d("mlp.c_proj", block.down),
    }


def _conv1d(name: str, linear) -> dict[str, np.ndarray]:
    """A linear layer; Hugging Face's Conv1D keeps its weight as ours, [in, out], and always has a bias."""
    kernel = _float32(linear.kernel)
    bias = np.zeros(kernel.shape[1], np.float32) if linear.bias is None else _float32(linear.bias)
    return {f"{name}.weight": kernel, f"{name}.bias": bias}


def _norm(name: str, norm) -> dict[str, np.ndarray]:
    return {f"{name}.weight": _float32(norm.scale), f"{name}.bias": _float32(norm.bias)}


def _float32(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float32)
