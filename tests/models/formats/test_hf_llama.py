"""Tests Hugging Face folders of the Llama family: round trips, dtypes, and refused folders."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
import transformers
from flax import nnx

from spectr_jax.models.formats import hf_llama
from spectr_jax.models.formats.folder import INDEX, WEIGHTS
from spectr_jax.models.formats.hf_config import read_shape
from spectr_jax.models.llama import Llama
from spectr_jax.models.quantized import quantize
from spectr_jax.models.rotary import llama3_divisors
from spectr_jax.utils.errors import UserError

LLAMA3_SCALING = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def _change(folder, **fields):
    path = folder / "config.json"
    given = {
        name: value
        for name, value in {**json.loads(path.read_text()), **fields}.items()
        if value != "gone"
    }
    path.write_text(json.dumps(given))


@pytest.fixture
def folder(llamas, tmp_path):
    hf_llama.save_llama(tmp_path / "llama", llamas["llama"], bos=1, eos=2)
    return tmp_path / "llama"


@pytest.mark.parametrize("kind", ["llama", "tied", "qwen2", "qwen3"])
def test_a_saved_folder_loads_as_the_same_model(llamas, kind, tmp_path):
    model = llamas[kind]
    hf_llama.save_llama(tmp_path, model)
    read = hf_llama.load_llama(tmp_path)
    assert read.config == model.config
    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(model))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__.startswith({"tied": "Llama"}.get(kind, kind.capitalize()))
    assert config.head_dim == model.config.head_width if kind != "qwen2" else True


def test_loading_in_int8_equals_quantizing_after_loading(llamas, tmp_path):
    for kind in ("llama", "tied"):
        hf_llama.save_llama(tmp_path / kind, llamas[kind])
        read = hf_llama.load_llama(tmp_path / kind, "int8")
        jax.tree.map(
            np.testing.assert_array_equal, nnx.state(read), nnx.state(quantize(llamas[kind]))
        )


def test_bfloat16_weights_in_several_files_load(llamas, folder):
    tensors = {
        name: array.astype(jnp.bfloat16)
        for name, array in safetensors.flax.load_file(folder / WEIGHTS).items()
    }
    names = sorted(tensors)
    places = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        safetensors.flax.save_file(
            {name: tensors[name] for name in names if places[name] == file}, folder / file
        )
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / WEIGHTS).unlink()
    read = hf_llama.load_llama(folder, "bfloat16")

    def rounded(leaf):
        """Scales of norms stay in float32; this model has no other vectors."""
        return leaf.astype(jnp.bfloat16).astype(jnp.bfloat16 if leaf.ndim > 1 else jnp.float32)

    expected = jax.tree.map(rounded, nnx.state(llamas["llama"]))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(read), expected)
    for leaf in jax.tree.leaves(nnx.state(read)):
        assert leaf.dtype == (jnp.bfloat16 if leaf.ndim > 1 else jnp.float32)


def test_llama3_and_linear_rotary_scaling_are_read(folder):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    expected = llama3_divisors(500_000.0, 8, factor=8.0, low=1.0, high=4.0, context=400)
    scaling["original_max_position_embeddings"] = 400
    for fields in (
        {"rope_theta": 500_000.0, "rope_scaling": scaling},
        {
            "rope_theta": "gone",
            "rope_scaling": None,
            "rope_parameters": {**scaling, "rope_theta": 500_000.0},
        },
        {
            "rope_parameters": {
                kind: {**scaling, "rope_theta": 500_000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        },
    ):
        _change(folder, **fields)
        read = read_shape(folder).config
        assert (
            read.rope_theta == 500_000.0
            and read.rope_divisors == expected
            and len(set(expected)) > 2
        )
    _change(
        folder,
        rope_parameters={"rope_type": "linear", "factor": 4.0},
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    assert read_shape(folder).config.rope_divisors == (4.0,) * 4


def test_absent_config_fields_have_defaults(folder):
    _change(
        folder,
        num_key_value_heads="gone",
        head_dim="gone",
        tie_word_embeddings="gone",
        rope_theta="gone",
    )
    read = read_shape(folder).config
    assert (read.kv_heads, read.head_width, read.tied, read.rope_theta) == (4, 8, False, 10_000.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "mixtral"},
            "has model_type='mixtral': must be 'gpt2' or 'llama' or 'mistral' or",
        ),
        ({"model_type": "gone"}, "has model_type=None: must be 'gpt2' or 'llama' or"),
        ({"hidden_act": "gelu"}, "has hidden_act='gelu': must be 'silu'"),
        ({"attention_bias": True}, "has attention_bias=True: must be False"),
        ({"mlp_bias": True}, "has mlp_bias=True: must be False"),
        ({"quantization_config": {"bits": 4}}, "has quantised weights, which are not read here"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "has rope_type='ntk': must be 'default' or 'linear' or",
        ),
        ({"partial_rotary_factor": 0.5}, "has partial_rotary_factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}},
            "has rotary positions of type 'llama3' without 'original_max_position_embeddings'",
        ),
        (
            {"model_type": "mistral", "sliding_window": "4"},
            "has sliding_window='4': must be a positive integer",
        ),
        ({"rope_scaling": {"factor": 4.0}}, "'factor': 4.0}: must be an object with a rope_type"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {}},
            "has rope_scaling={'type': 'linear', 'factor': 2.0}: must be equal to rope_parameters",
        ),
        (
            {"rope_scaling": {**dict.fromkeys(LLAMA3_SCALING, 4.0), "rope_type": "llama3"}},
            "has low_freq_factor=4.0: must be below high_freq_factor=4.0",
        ),
        (
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_theta": 5.0}}},
            "has rope_parameters={'full_attention': {}, 'sliding_attention': {'rope_theta': 5: must be one object, or equal",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 5.0}, "rope_theta": 4.0}},
            "must be one object, or objects for full_attention and sliding_attention",
        ),
        ({"rope_scaling": "linear"}, "has rope_scaling='linear': must be an object; give"),
        ({"hidden_act": ["silu"]}, "has hidden_act=['silu']: must be"),
        (
            {"rope_theta": 1, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "must be numbers for positions of type 'yarn'",
        ),
        (
            {"model_type": "gemma3_text", "query_pre_attn_scalar": None},
            "has query_pre_attn_scalar=None: must be a positive number",
        ),
        ({"draft_vocab_size": 8}, "is a draft head; give eagle3:"),
        ({"rope_theta": "x"}, "has rope_theta='x': must be a positive number"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "has factor=0: must be a positive number",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "has factor='2': must be a positive number",
        ),
        ({"rms_norm_eps": "small"}, "has rms_norm_eps='small': must be a non-negative number"),
        ({"rms_norm_eps": "gone"}, "has a config.json without 'rms_norm_eps'"),
        ({"vocab_size": 2.5}, "has vocab_size=2.5: must be a positive integer"),
        ({"num_hidden_layers": "gone"}, "has a config.json without 'num_hidden_layers'"),
        ({"tie_word_embeddings": 1}, "has tie_word_embeddings=1: must be true or false"),
        ({"num_key_value_heads": 3}, "heads=4: must be a multiple of kv_heads=3"),
        (
            {"hidden_size": 48},
            "embed/embedding is [300, 32] where its configuration gives [300, 48]",
        ),
        (
            {"num_hidden_layers": 3},
            "lacks 'model.layers.2.input_layernorm.weight', a part of its model",
        ),
    ],
)
def test_unsupported_or_invalid_configs_are_refused(folder, fields, message):
    _change(folder, **fields)
    with pytest.raises(UserError, match=re.escape(message)):
        hf_llama.load_llama(folder)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_absent_config_fields_default_as_in_transformers(folder, kind):
    """Absent and null fields get the defaults of transformers, which differ between families."""
    fields = {
        "model_type": kind,
        "num_attention_heads": 32,
        "hidden_size": 320,
        "max_position_embeddings": 4096,
    }
    for given in ("gone", None):
        _change(
            folder,
            **fields,
            head_dim=given,
            num_key_value_heads=given,
            tie_word_embeddings="gone",
            sliding_window=given,
        )
        theirs = transformers.AutoConfig.from_pretrained(folder)
        read = read_shape(folder).config
        width = getattr(theirs, "head_dim", None) or 10
        assert (read.kv_heads, read.head_width, read.tied) == (
            theirs.num_key_value_heads or 32,
            width,
            theirs.tie_word_embeddings,
        )


def test_a_single_weight_file_is_preferred_to_an_index(llamas, folder):
    """transformers prefers the single file too. The error for a missing part names the part."""
    index = folder / INDEX
    index.write_text("{")
    assert hf_llama.load_llama(folder).config == llamas["llama"].config
    (folder / WEIGHTS).unlink()
    index.write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(
        UserError, match=r"weights that cannot be read \(.*model-00001-of-00002\.safetensors"
    ):
        hf_llama.load_llama(folder)


def test_the_index_decides_which_file_has_a_tensor(llamas, folder):
    """Another file may have another tensor of the same name, which is not read."""
    tensors, name = safetensors.numpy.load_file(folder / WEIGHTS), "model.norm.weight"
    (folder / WEIGHTS).unlink()
    first = {name: tensors.pop(name), "x.rotary_emb.inv_freq": np.ones(3)}
    safetensors.numpy.save_file(first, folder / "a.safetensors")
    for other in ({}, {name: np.zeros(32, np.float32)}):
        safetensors.numpy.save_file(tensors | other, folder / "b.safetensors")
        places = {name: "a.safetensors", **dict.fromkeys(tensors, "b.safetensors")}
        (folder / INDEX).write_text(json.dumps({"weight_map": places}))
        read = hf_llama.load_llama(folder)
        jax.tree.map(np.testing.assert_array_equal, nnx.state(read), nnx.state(llamas["llama"]))
    embed = "model.embed_tokens.weight"
    for changed, message in (
        ({embed: "a.safetensors"}, f"places {embed} in 'a.safetensors', which lacks it"),
        ({name: None}, f"does not place {name}, which two files have"),
    ):
        found = {place: file for place, file in (places | changed).items() if file}
        found |= {"x.rotary_emb.inv_freq": "a.safetensors"}
        (folder / INDEX).write_text(json.dumps({"weight_map": found}))
        with pytest.raises(UserError, match=rf"index\.json' {message}"):
            hf_llama.load_llama(folder)


def test_floats_of_any_dtype_load_and_integers_are_refused(llamas, folder):
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    kinds = (np.float16, jnp.bfloat16, np.float32, np.float64)
    mixed = {
        name: array.astype(kinds[index % 4])
        for index, (name, array) in enumerate(sorted(tensors.items()))
    }
    safetensors.numpy.save_file(mixed, folder / WEIGHTS)
    written = hf_llama.llama_tensors(hf_llama.load_llama(folder))
    assert written.keys() == mixed.keys()
    for name, array in written.items():
        np.testing.assert_array_equal(array, mixed[name].astype(np.float32))
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    safetensors.numpy.save_file(tensors, folder / WEIGHTS)
    with pytest.raises(UserError, match=r"has model\.norm\.weight in I8; give a model in F64"):
        hf_llama.load_llama(folder)


def test_sliding_windows_as_wide_as_the_context_load(folder):
    _change(folder, model_type="mistral", sliding_window=64)
    assert hf_llama.load_llama(folder).config.context == 64


def test_saving_models_without_a_hugging_face_layout_is_refused(llamas, tmp_path):
    with pytest.raises(UserError, match="an int8 model cannot be written"):
        hf_llama.save_llama(tmp_path, quantize(llamas["llama"]))
    for part in (
        {"embed_rank": 8},
        {"head_tokens": 16},
        {"features": llamas["llama"].config.width},
        {"rope_divisors": (2.0,) * 4},
    ):
        student = Llama(
            dataclasses.replace(llamas["llama"].config, tied=False, **part), rngs=nnx.Rngs(0)
        )
        with pytest.raises(
            UserError, match=rf"{next(iter(part))}=.*: cannot be written to a Hugging Face folder"
        ):
            hf_llama.save_llama(tmp_path, student)
    assert not list(tmp_path.iterdir())
