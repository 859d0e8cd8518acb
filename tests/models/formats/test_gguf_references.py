"""Writes the recorded models of transformers as GGUF files, and compares what is read from these.

`converted` does what llama.cpp's converter does with a Hugging Face folder.
"""

import dataclasses
import json
import math
import pathlib
import re

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from helpers import names_in
from spectr_jax.models.formats.gguf import NAMES, gguf_config, load_gguf
from spectr_jax.models.formats.gguf_file import GGUF
from spectr_jax.models.formats.hf_llama import NAMES as HF_NAMES
from spectr_jax.models.formats.hf_llama import POST_NORMS
from spectr_jax.utils.errors import UserError

HERE = pathlib.Path(__file__)
SCRIPT = names_in("scripts/dev/references.py")
PUT = {
    str: gguf.GGUFWriter.add_string,
    bool: gguf.GGUFWriter.add_bool,
    int: gguf.GGUFWriter.add_uint32,
    float: gguf.GGUFWriter.add_float32,
    list: gguf.GGUFWriter.add_array,
}
ARCHITECTURES = {"gemma3_text": "gemma3", "gemma4_text": "gemma4", "mistral": "llama"}
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.freq_base_swa": "rope_local_base_freq",
}
SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def converted(folder: pathlib.Path, path: pathlib.Path, more=None, **changes) -> None:
    """Writes the model in `folder` as a GGUF file.

    `more` are additional tensors, and `changes` overwrite the metadata; None removes a value.
    """
    given = json.loads((folder / "config.json").read_text())
    kind = given["model_type"]
    arch = ARCHITECTURES.get(kind, kind)
    scaling = given.get("rope_scaling", {})
    values = {ours: given[theirs] for ours, theirs in FIELDS.items() if theirs in given}
    values |= {
        f"rope.scaling.{ours}": scaling[theirs]
        for ours, theirs in SCALING.items()
        if theirs in scaling
    }
    values["rope.freq_base"] = scaling.get("rope_theta", given.get("rope_theta", 1e4))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    extra = {}
    if kind == "gemma4_text":
        width, slides = given["global_head_dim"], [True] * 5 + [False]
        heads = given["num_key_value_heads"], given["num_global_key_value_heads"]
        values |= {
            "attention.key_length": width,
            "attention.value_length": width,
            "attention.key_length_swa": given["head_dim"],
            "attention.value_length_swa": given["head_dim"],
            "attention.head_count_kv": [heads[0] if each else heads[1] for each in slides],
            "attention.sliding_window_pattern": slides,
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 1e4,
            "rope.dimension_count": width,
            "rope.dimension_count_swa": given["head_dim"],
        }
        extra["rope_freqs.weight"] = np.array([1.0] * (width // 8) + [1e30] * (width * 3 // 8))
    if "short_factor" in scaling:
        original = scaling["original_max_position_embeddings"]
        longer = given["max_position_embeddings"] / original
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(longer) / math.log(original))
        values["rope.dimension_count"] = int(given["head_dim"] * given["partial_rotary_factor"])
        for name in ("short", "long"):
            extra[f"rope_factors_{name}.weight"] = np.array(scaling[f"{name}_factor"])
    writer = gguf.GGUFWriter(path, arch)
    tokenizer = {"tokens": [f"t{i}" for i in range(given["vocab_size"])]}
    values = {f"{arch}.{name}": value for name, value in values.items()}
    values |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    for name, value in {**values, **changes}.items():
        if value is not None:
            PUT[type(value)](writer, name, value)
    for name, array in {**_renamed(tensors, given, arch), **extra, **(more or {})}.items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(tensors, given, arch):
    """Returns tensors by llama.cpp's names, as its files have them."""
    post = POST_NORMS if arch.startswith("gemma") and arch != "gemma" else {}
    ours = {theirs: NAMES[name] for name, theirs in {**HF_NAMES, **post}.items()}
    ours |= {
        "self_attn.qkv_proj.weight": "attn_qkv.weight",
        "mlp.gate_up_proj.weight": "ffn_up.weight",
    }
    renamed, D = {}, given["head_dim"]
    for name, array in tensors.items():
        layer, found = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)", name).groups()
        if arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            array = 1 + array
        if arch == "llama" and found in (HF_NAMES["q"], HF_NAMES["k"]):
            array = (
                array.reshape(-1, 2, D // 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
            )
        # GGUF files do not say by which number scores are divided: it is the width of a head.
        if found == {"gemma2": HF_NAMES["q"], "gemma3": HF_NAMES["norm_q"]}.get(arch):
            array = array * math.sqrt(D / given["query_pre_attn_scalar"])
        renamed[ours[found] if layer is None else f"blk.{layer}.{ours[found]}"] = array
    return renamed


MODELS = sorted(SCRIPT.MODELS.keys() - {"qwen2", "llama_dynamic"})
"""GGUF files of Qwen 2 do not say which layers have windows, and none has a dynamic scaling."""


@pytest.mark.parametrize("name", MODELS)
def test_gguf_files_have_the_logits_of_transformers(name, tmp_path):
    """The prompt is longer than the windows."""
    recorded = SCRIPT.write(name, tmp_path)
    converted(tmp_path, tmp_path / "model.gguf")
    model = load_gguf(GGUF(tmp_path / "model.gguf"))
    tokens = SCRIPT.prompt(model.vocab_size)
    N = len(tokens)
    given = jnp.asarray(tokens)[None], jnp.arange(N)[None], jnp.tri(N, dtype=bool)[None]
    np.testing.assert_allclose(model.extend(*given)[0][0], recorded["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        (
            "gemma2",
            {"attn_logit_softcapping": None, "final_logit_softcapping": None},
            {"attention_cap": 50.0, "logit_cap": 30.0},
        ),
        ("gemma2", {"attention.sliding_window": None}, {"windows": (4096, 0) * 2}),
        (
            "gemma2",
            {"attention.sliding_window_pattern": 3, "rope.freq_base_swa": 7.0},
            {"windows": (6, 6, 0, 6), "window_rope_theta": 7.0},
        ),
        (
            "gemma2",
            {"attention.sliding_window_pattern": [False, True, True, False]},
            {"windows": (0, 6, 6, 0)},
        ),
        ("gemma2", {"attention.sliding_window": 0}, {"windows": ()}),
        ("gemma2", {"block_count": 46}, {"query_width": 8.0}),
        ("gemma3", {"block_count": 62}, {"query_width": 8.0}),
        ("gemma3", {"rope.freq_base_swa": None}, {"window_rope_theta": 1e4}),
        (
            "gemma3",
            {"rope.freq_base_swa": None, "rope.freq_base": None, "rope.scaling.type": "none"},
            {"window_rope_theta": 0.0, "rope_divisors": ()},
        ),
        ("mistral", {"attention.sliding_window": 64}, {"windows": ()}),
        ("llama_yarn", {"context_length": 20}, {"context": 256}),
        ("phi3_long", {}, {"context": 56}),
    ],
)
def test_values_that_gguf_files_leave_out_are_those_of_llama_cpp(name, changes, expected, tmp_path):
    """Only the config is read: a model of 62 layers lacks most of its tensors here."""
    file = _changed(name, changes, tmp_path)
    config = dataclasses.asdict(gguf_config(file))
    assert {field: config[field] for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gemma3",
            {"attention.sliding_window_pattern": [True, False]},
            "sliding_window_pattern=[True, False]: must be a number of layers, or 7 values that say",
        ),
        ("gemma4", {"attention.sliding_window_pattern": None}, "sliding_window_pattern=None: must"),
        ("gemma4", {"embedding_length_per_layer_input": 8}, "per_layer_input=8: must be 0"),
        ("gemma4", {"attention.shared_kv_layers": 2}, "shared_kv_layers=2: must be 0"),
        ("gemma4", {"rope.dimension_count_swa": 4}, "rope.dimension_count_swa=4: must be 8"),
        ("gemma4", {"attention.head_count_kv": [2, 2, 2, 2, 1, 1]}, "one for each layer, equal in"),
        ("qwen3", {"attention.sliding_window": 5}, "must be at least the context of 64"),
        (
            "phi3_long",
            {"rope.dimension_count": 5},
            "rope.dimension_count=5: must be an even number",
        ),
        ("phi3_long", {"rope.dimension_count": 4}, "rope_factors_short.weight of shape (3,): must"),
        (
            "llama_yarn",
            {"rope.scaling.yarn_beta_slow": -1.0},
            "beta_slow=-1.0: must be a non-negat",
        ),
    ],
)
def test_shapes_of_other_models_are_refused(name, changes, message, tmp_path):
    file = _changed(name, changes, tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        load_gguf(file)


def _changed(name, changes, folder):
    """Returns the GGUF file of a recorded model with changed metadata."""
    SCRIPT.write(name, folder)
    arch = name.split("_")[0].replace("mistral", "llama")
    last = f"blk.{changes.get('block_count', 1) - 1}.attn_norm.weight"
    changes = {f"{arch}.{field}": value for field, value in changes.items()}
    converted(folder, folder / "model.gguf", {last: np.ones(32)}, **changes)
    return GGUF(folder / "model.gguf")
