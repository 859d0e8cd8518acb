"""Tests that loading a model takes little more memory than the model itself."""

import json
import os
import pathlib
import subprocess
import sys

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from flax import nnx

from spectr_jax.data.hugging_face import HuggingFaceTokenizer
from spectr_jax.models.formats import hf_llama
from spectr_jax.models.formats.gguf import NAMES
from spectr_jax.models.llama import LlamaConfig, abstract

MOST = 1.3
"""Largest ratio of peak memory to the model's size: a layer's parts and the allocator add to it."""
WIDTH, MLP, VOCABULARY = 256, 768, 300
MEASURE = """
import os, pathlib, sys
import jax
from flax import nnx
from spectr_jax.data import gguf_tokenizer, hugging_face
from spectr_jax.loading.by_name import load
from spectr_jax.models.formats import gguf, gpt2, hf_llama

def memory(name):
    return 1024 * int(pathlib.Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

for small, large in zip(sys.argv[1::2], sys.argv[2::2]):
    if os.fork():  # One process per model: memory that another model has freed would not count.
        os.wait()
        continue
    load(small, "float32")
    before = memory("VmRSS")
    state = nnx.state(load(large, "float32").model)
    print(large, (memory("VmHWM") - before) / sum(leaf.nbytes for leaf in jax.tree.leaves(state)), flush=True)
    os._exit(0)
"""


def _llama(layers: int):
    sizes = {"layers": layers, "width": WIDTH, "mlp": MLP, "vocab_size": VOCABULARY, "context": 32}
    graphdef, state = abstract(LlamaConfig(**sizes, heads=4, kv_heads=4, head_width=64))
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state))


def _tokenizer() -> tokenizers.Tokenizer:
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(
        ["again and again"], vocab_size=VOCABULARY, special_tokens=["<s>"], show_progress=False
    )
    return tokenizers.Tokenizer.from_str(made.to_str())


def _write_gguf(path: pathlib.Path, layers: int, tensors: dict[str, np.ndarray]) -> None:
    """Writes a file of architecture qwen2, whose rotary pairs are as in a folder."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(32)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    given = json.loads(_tokenizer().to_str())["model"]
    tokens = [*sorted(given["vocab"], key=given["vocab"].get)]
    tokens += [f"<{number}>" for number in range(len(tokens), VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([" ".join(pair) for pair in given["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    theirs = {theirs: NAMES[ours] for ours, theirs in hf_llama.NAMES.items()}
    for name, array in tensors.items():
        layer, _, own = name.removeprefix("model.layers.").partition(".")
        writer.add_tensor(theirs[name] if name in theirs else f"blk.{layer}.{theirs[own]}", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_all(folder: pathlib.Path, layers: int, write_gpt2) -> list[str]:
    """Writes a Llama as a folder and as a GGUF file, and a GPT-2; returns their names."""
    llama, tokenizer = _llama(layers), HuggingFaceTokenizer(_tokenizer(), 0, 0)
    hf_llama.save_llama(folder / "llama", llama, 0, 0)
    tokenizer.save(folder / "llama", 32)
    _write_gguf(folder / "llama.gguf", layers, hf_llama.llama_tensors(llama))
    write_gpt2(folder / "gpt2", VOCABULARY, layers=layers, E=WIDTH, T=32)
    tokenizer.save(folder / "gpt2", 32)
    return [f"hf:{folder / 'llama'}", f"gguf:{folder / 'llama.gguf'}", f"hf:{folder / 'gpt2'}"]


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="only Linux has /proc/self/status"
)
def test_loading_a_model_takes_little_extra_memory(tmp_path, write_gpt2):
    """Loads 40 MB in a process that has loaded a small model before. Mapped files count too."""
    sizes = {"small": 1, "large": 12}
    names = [_write_all(tmp_path / size, layers, write_gpt2) for size, layers in sizes.items()]
    pairs = [name for pair in zip(*names, strict=True) for name in pair]
    flags = {
        "env": {**os.environ, "JAX_PLATFORMS": "cpu"},
        "capture_output": True,
        "text": True,
        "check": True,
    }
    lines = subprocess.run([sys.executable, "-c", MEASURE, *pairs], **flags).stdout.splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert found.keys() == set(names[1])
    assert all(0.9 < times < MOST for times in found.values()), found
    assert (
        len(safetensors.numpy.load_file(tmp_path / "large" / "llama" / "model.safetensors"))
        == 12 * 9 + 3
    )
