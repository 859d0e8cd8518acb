"""Tests EAGLE-3 heads: recorded outputs of speculators, four layouts of one head, refused heads."""

import io
import json
import pathlib
import pickle
import runpy
import sys
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from spectr_jax.decoding import get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.loading.by_name import Trained, load
from spectr_jax.loading.pairs import fitted
from spectr_jax.models.formats.eagle3 import load_eagle3
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import Llama, LlamaConfig, rotary_frequencies, turns
from spectr_jax.models.quantized import quantize
from spectr_jax.utils.errors import UserError

REFERENCES = pathlib.Path(__file__).parents[2] / "references"
weight = runpy.run_path(str(REFERENCES / "weights.py"))["weight"]
HEADS = ("llama", "qwen3", "fc_norm", "whole")
WIDTH, VOCABULARY = 32, 60


def recorded(name):
    """Returns the config, the tensors and the recorded outputs of a head."""
    description = json.loads((REFERENCES / f"eagle3_{name}.json").read_text())
    arrays = dict(np.load(REFERENCES / f"eagle3_{name}.npz"))
    shapes = {name: tuple(shape) for name, shape in description["shapes"].items()}
    tensors = {name: weight(name, shape) for name, shape in shapes.items()}
    if "d2t" in tensors:
        kept = np.arange(len(arrays["d2t"])) + arrays["d2t"]
        tensors |= {"d2t": arrays["d2t"], "t2d": np.isin(np.arange(VOCABULARY), kept)}
    return description["config"], tensors, arrays["logits"]


def written(folder, config, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def target_of(layers=7, seed=0, **changes):
    shape = {"width": WIDTH, "mlp": 48, "heads": 4, "kv_heads": 2, "head_width": 8}
    config = LlamaConfig(layers=layers, **shape | {"vocab_size": VOCABULARY} | changes, context=128)
    model = Llama(config, rngs=nnx.Rngs(seed))
    return Trained("target", model, types.SimpleNamespace(vocabulary="its own"))


def ours(model, steps, tokens, features):
    """Returns logits [steps, T, V] of a head, as `numpy_logits`, with all steps in one cache."""
    T = len(tokens)
    # Neither the first token of a sequence nor the last hidden state changes anything.
    read = jnp.asarray(np.append(5, tokens))[None]
    shown = np.concatenate([np.full((T, WIDTH), 7, np.float32), features], axis=1)
    seen = jnp.pad(jnp.asarray(shown), ((1, 0), (0, 0)))[None]
    cache = model.init_cache(1, 64)
    place = jnp.arange(T + 1)[None], causal(jnp.zeros((1, T + 1)))
    own, cache = model.hidden(read, *place, cache, features_BxNxE=seen)
    alone, _ = model.hidden(read, *place, features_BxNxE=seen)
    np.testing.assert_allclose(own, alone, atol=1e-5)
    found, own, before = [model.logits_of(own)[0, 1:]], own[:, 1:], np.tri(T, T + 1, 1, dtype=bool)
    for step in range(1, steps):
        shifted = jnp.asarray(np.append(tokens[step:], [0] * step))[None]
        before = np.concatenate([before, np.eye(T, dtype=bool)], axis=1)
        place = jnp.arange(1, T + 1)[None] + step, jnp.asarray(before)[None]
        pending = before.shape[1] - T
        own, cache = model.hidden(shifted, *place, cache, pending, features_BxNxE=own)
        found.append(model.logits_of(own)[0])
    return np.stack(found)


def numpy_logits(config, tensors, steps, tokens, features):
    """Returns logits [steps, T, scored tokens] of a head in float64, one chain of drafts at a time.

    At index t the head has seen t + 1 tokens with features of the target, then `steps - 1` drafts.
    """
    layer = config["transformer_layer_config"]
    w = {name: array.astype(np.float64) for name, array in tensors.items()}
    D, theta = layer["head_dim"], layer["rope_parameters"]["rope_theta"]
    frequencies = theta ** (-np.arange(0, D, 2) / D)
    if (scaling := layer["rope_parameters"])["rope_type"] == "llama3":
        length, context = 2 * np.pi / frequencies, scaling["original_max_position_embeddings"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = np.clip((context / length - low) / (high - low), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling["factor"])

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + layer["rms_norm_eps"]) * w[name]

    def rotated(x, position):
        turned = (x[..., : D // 2] + 1j * x[..., D // 2 :]) * np.exp(1j * position * frequencies)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def run(token, position, state, past):
        """Returns the state after one token; `past` has the keys and values of each layer."""
        x = w["embed_tokens.weight"][token]
        for index in range(layer["num_hidden_layers"]):
            name = f"layers.{index}."
            normed = norm(x, name + "input_layernorm.weight")
            residual = x
            if index == 0:
                features = norm(state, name + "hidden_norm.weight")
                normed = np.concatenate([normed, features])
                residual = features if config["norm_before_residual"] else state
            q, k, v = (
                (w[f"{name}self_attn.{part}_proj.weight"] @ normed).reshape(-1, D) for part in "qkv"
            )
            if layer["model_type"] == "qwen3":
                q, k = (
                    norm(q, name + "self_attn.q_norm.weight"),
                    norm(k, name + "self_attn.k_norm.weight"),
                )
            past[index].append((rotated(k, position), v))
            keys, values = (
                np.repeat(np.stack(part, 1), len(q) // len(k), 0)
                for part in zip(*past[index], strict=True)
            )
            scores = np.einsum("hd,htd->ht", rotated(q, position), keys) / np.sqrt(D)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("ht,htd->hd", scores / scores.sum(-1, keepdims=True), values)
            x = residual + w[name + "self_attn.o_proj.weight"] @ mixed.ravel()
            normed = norm(x, name + "post_attention_layernorm.weight")
            gate, up = (w[f"{name}mlp.{part}_proj.weight"] @ normed for part in ("gate", "up"))
            x = x + w[name + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        return norm(x, "norm.weight") if config["norm_output"] else x

    if config["fc_norm"]:
        parts = np.split(features.astype(np.float64), 3, axis=-1)
        fused = [norm(part, f"fc_norm.{index}.weight") for index, part in enumerate(parts)]
        features = np.concatenate(fused, axis=-1)
    if config["norm_before_fc"]:
        features = norm(features.astype(np.float64), "input_norm.weight")
    features = features @ w["fc.weight"].T
    found, past = [], [[] for _ in range(layer["num_hidden_layers"])]
    for t, token in enumerate(tokens):
        chain = [run(token, t + 1, features[t], past)]
        drafted = [list(rows) for rows in past]
        for step in range(1, steps):
            after = tokens[t + step] if t + step < len(tokens) else 0
            chain.append(run(after, t + 1 + step, chain[-1], drafted))
        states = np.stack(chain)
        found.append(
            (states if config["norm_output"] else norm(states, "norm.weight"))
            @ w["lm_head.weight"].T
        )
    return np.stack(found, axis=1)


@pytest.mark.parametrize("name", HEADS)
def test_logits_equal_those_of_speculators(name, tmp_path):
    """Checks tokens with the target's features, then drafts with the head's own, two levels deep."""
    config, tensors, expected = recorded(name)
    steps, T, _ = expected.shape
    tokens = np.arange(1, T + 1) * 7 % VOCABULARY
    features = weight("features", (T, tensors["fc.weight"].shape[1]))
    exact = numpy_logits(config, tensors, steps, tokens, features)
    np.testing.assert_allclose(expected, exact, atol=2e-5)
    model = load_eagle3(written(tmp_path, config, tensors))
    logits = ours(model, steps, tokens, features)
    kept = np.flatnonzero(tensors["t2d"]) if "t2d" in tensors else np.arange(VOCABULARY)
    np.testing.assert_allclose(logits[..., kept], expected, atol=1e-4)
    assert np.isneginf(np.delete(logits, kept, axis=-1)).all()


def _write_pickled(path, tensors):
    """Writes arrays as PyTorch does: a pickle that names functions of PyTorch, and storages."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    torch.FloatStorage = type("FloatStorage", (), {"__module__": "torch"})
    torch.LongStorage = type("LongStorage", (), {"__module__": "torch"})
    torch.BoolStorage = type("BoolStorage", (), {"__module__": "torch"})

    def _rebuild_tensor_v2(*_):
        """Stands for the function of PyTorch."""

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = (
        "torch._utils",
        "_rebuild_tensor_v2",
    )
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    kinds = {"f": torch.FloatStorage, "i": torch.LongStorage, "b": torch.BoolStorage}

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            return obj if isinstance(obj, tuple) and obj[:1] == ("storage",) else None

        def reducer_override(self, obj):
            if not isinstance(obj, np.ndarray):
                return NotImplemented
            key = next(name for name, array in tensors.items() if array is obj)
            storage = ("storage", kinds[obj.dtype.kind], key, "cpu", obj.size)
            strides = tuple(stride // obj.itemsize for stride in obj.strides)
            return _rebuild_tensor_v2, (storage, 0, obj.shape, strides, False, {})

    with pytest.MonkeyPatch.context() as patch, zipfile.ZipFile(path, "w") as archive:
        patch.setitem(sys.modules, "torch", torch)
        patch.setitem(sys.modules, "torch._utils", utils)
        listing = io.BytesIO()
        Pickler(listing, 2).dump(tensors)
        archive.writestr("head/data.pkl", listing.getvalue())
        for name, array in tensors.items():
            archive.writestr(f"head/data/{name}", array.tobytes())


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def layouts(tmp_path):
    """Returns the folders of one head in the layouts of its publishers."""
    config, tensors, _ = recorded("llama")
    layer, draft = config["transformer_layer_config"], {"draft_vocab_size": 24}
    scaling = dict(layer["rope_parameters"])
    old = {
        name: value
        for name, value in layer.items()
        if name not in ("rope_parameters", "layer_types")
    }
    old |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    flat = {
        name.replace("layers.0.", "midlayer."): array
        for name, array in tensors.items()
        if not name.startswith("verifier")
    }
    without = {name: array for name, array in flat.items() if name != "embed_tokens.weight"}
    authors = written(
        tmp_path / "authors",
        old | draft | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40},
        {},
    )
    (authors / "model.safetensors").unlink()
    _write_pickled(authors / "pytorch_model.bin", without)
    order = np.random.default_rng(1).permutation(
        24
    )  # Any order of the head's tokens is the same head.
    kept = np.arange(24) + tensors["d2t"]
    mixed = {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": kept[order] - np.arange(24)}
    return {
        "authors": authors,
        "angelslim": written(
            tmp_path / "angelslim",
            old
            | draft
            | {
                "architectures": ["Eagle3LlamaForCausalLM"],
                "target_model_type": "qwen3",
                "tie_word_embeddings": True,
            },
            flat | mixed,
        ),
        "specforge": written(
            tmp_path / "specforge",
            {name: value for name, value in layer.items() if name != "layer_types"}
            | draft
            | {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "phi3",
                "eagle_config": {IDS: [1, 2, 3]},
            },
            {f"model.{name}": array for name, array in without.items()},
        ),
        "speculators": written(tmp_path / "speculators", config | {IDS: [2, 3, 4]}, tensors),
    }


def test_layouts_of_one_head_have_the_same_logits_and_tokens(layouts):
    target = target_of()
    target.model.embed.embedding[...] = recorded("llama")[1]["embed_tokens.weight"]
    prompts, method = (
        np.array([[3, 1, 4, 1, 5], [2, 7, 1, 0, 0]]),
        get_method("otm_block", tree="2,2,1"),
    )
    found = {}
    for name, folder in layouts.items():
        head = fitted(load(f"eagle3:{folder}", "float32"), target)
        assert head.model.feature_layers == (2, 3, 4)
        assert head.model.context == 128
        made = generate(jax.random.key(0), method, target, head, prompts, np.array([5, 3]), 20)
        found[name] = nnx.state(head.model), np.asarray(made.tokens), np.asarray(made.target_calls)
        if name in ("authors", "specforge"):
            embeds = (model.embed.embedding[...] for model in (head.model, target.model))
            assert len({embed.unsafe_buffer_pointer() for embed in embeds}) == 1
    assert found["authors"][2].max() < 20
    for name in layouts:
        jax.tree.map(np.testing.assert_array_equal, found[name], found["authors"])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2, 4, 6)),
        ({IDS: None}, (2, 4, 6)),
        ({IDS: [1, 2, 9]}, (1, 2, 9)),
        ({"eagle_config": {IDS: [1, 2, 8]}}, (2, 3, 9)),
        ({"eagle_config": {IDS: [2, 5, 9]}}, (2, 5, 9)),
        ({"eagle_config": {IDS: []}}, (2, 4, 6)),
    ],
)
def test_layers_are_those_of_the_target_from_1(tmp_path, fields, expected):
    config, tensors, _ = recorded("llama")
    head = load_eagle3(written(tmp_path, config | {IDS: None} | fields, tensors))
    assert head.completed(target_of(layers=9).model).feature_layers == expected


def test_a_head_reads_the_layers_of_its_target_and_not_its_last_state(tmp_path):
    """The default layers of a target are the states before its layers 2, L // 2 and L - 3, from 0."""
    config, tensors, _ = recorded("llama")
    target = target_of(layers=9).model
    head = load_eagle3(written(tmp_path, config, tensors)).completed(target)
    tokens = jnp.arange(6)[None]
    place = tokens, jnp.arange(6)[None], causal(jnp.zeros((1, 6)))
    shown, _ = target.hidden(*place, also=head.feature_layers)
    before, x = {}, target.embed(tokens)
    for index, block in enumerate(target.blocks):
        before[index] = x
        shape = turns(place[1], rotary_frequencies(target.config)), place[2], None, None
        x, _ = block(x, *shape)
    states = jnp.concatenate([before[2], before[9 // 2], before[9 - 3]], axis=-1)
    np.testing.assert_allclose(shown[..., WIDTH:], states, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_heads_load_in_smaller_dtypes(tmp_path, dtype):
    config, tensors, expected = recorded("qwen3")
    folder, (_, T, _) = written(tmp_path, config, tensors), expected.shape
    model = load_eagle3(folder, dtype)
    if dtype == "int8":
        quantized = quantize(load_eagle3(folder))
        jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(quantized))
    features = weight("features", (T, tensors["fc.weight"].shape[1]))
    cache = model.init_cache(1, 16)
    assert cache.rows[0][0].dtype == {"bfloat16": jnp.bfloat16, "int8": jnp.float32}[dtype]
    tokens = jnp.asarray(np.append(5, np.arange(1, T + 1) * 7 % VOCABULARY))[None]
    shown = np.pad(features, ((1, 0), (WIDTH, 0)))[None]
    place = jnp.arange(T + 1)[None], causal(jnp.zeros((1, T + 1)))
    own, _ = model.hidden(tokens, *place, cache, features_BxNxE=jnp.asarray(shown))
    logits = model.logits_of(own)[0, 1:, np.flatnonzero(tensors["t2d"])].T
    np.testing.assert_allclose(logits, expected[0], atol=0.15)


SLIDING = {"layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("fields", "layer", "message"),
    [
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "architectures="),
        (
            {"speculators_model_type": "dflash"},
            {},
            "speculators_model_type='dflash': must be 'eagle3'",
        ),
        ({"quantization_config": {"bits": 4}}, {}, "quantization_config="),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state=False"),
        ({"eagle_config": {"parallel_draft_step": 4}}, {}, "parallel_draft_step=4"),
        ({"eagle_config": 3}, {}, "eagle_config=3: must be an object"),
        ({"transformer_layer_config": []}, {}, r"transformer_layer_config=\[\]: must be an object"),
        ({"fc_norm": True, "norm_before_fc": True}, {}, "fc_norm=True: must be false with"),
        ({"norm_output": "yes"}, {}, "norm_output='yes': must be true or false"),
        ({"draft_vocab_size": 0}, {}, "draft_vocab_size=0: must be a positive integer"),
        ({"draft_vocab_size": 25}, {}, "'d2t' must name 25 different tokens of 60"),
        ({"target_hidden_size": 48}, {}, r"fuse/kernel is \[96, 32\] where .* gives \[144, 32\]"),
        ({"fc_norm": True}, {}, r"lacks 'fc_norm.0.weight'"),
        ({IDS: 3}, {}, f"{IDS}=3: must be a list of layers"),
        ({IDS: [0, 2, 4]}, {}, rf"{IDS}=\[0, 2, 4\]: must be distinct layers"),
        ({IDS: [2, 2, 4]}, {}, "must be distinct layers"),
        ({IDS: [2, 4]}, {}, r"fuse/kernel is \[96, 32\] where .* gives \[64, 32\]"),
        ({}, SLIDING, r"layer_types=\['sliding_attention'\]: must be full_attention"),
        ({}, {"model_type": "gemma2"}, "model_type='gemma2': must be 'llama' or 'qwen3'"),
        ({}, {"attention_bias": True}, "attention_bias=True"),
        ({}, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({}, {"hidden_size": 40}, r"0.q is \[32, 64\] where .* gives \[32, 80\]"),
        ({}, {"vocab_size": None}, "config.json without 'vocab_size'"),
        ({}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
    ],
)
def test_heads_that_differ_are_refused(tmp_path, fields, layer, message):
    config, tensors, _ = recorded("llama")
    config |= fields
    if layer:
        config["transformer_layer_config"] |= layer
    with pytest.raises(UserError, match=message) as error:
        load(f"eagle3:{written(tmp_path, config, tensors)}", "float32")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers.0.hidden_norm.weight": None}, "heads of EAGLE-1 and EAGLE-2, MTP modules"),
        ({"fc.weight": None}, "lacks 'fc.weight'"),
        ({"lm_head.weight": None}, "lacks 'lm_head.weight'"),
        ({"layers.0.self_attn.q_proj.weight": None}, "lacks 'layers.0.self_attn.q_proj.weight'"),
        ({"d2t": None}, "scores 24 of 60 tokens and lacks 'd2t'"),
        ({"d2t": np.zeros(23, np.int64)}, "'d2t' must name 24 different tokens"),
        ({"d2t": np.full(24, 40)}, "'d2t' must name 24 different tokens"),
        ({"d2t": np.arange(24)[::-1] - np.arange(24) * 2}, "'d2t' must name 24 different tokens"),
        ({"d2t": np.zeros(24, np.float32)}, "has d2t in F32; give a model in I32, I64"),
        (
            {"layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)},
            "has layers.0.self_attn.q_norm",
        ),
        ({"norm.weight": np.full(32, np.nan, np.float32)}, "norm/scale"),
    ],
)
def test_heads_with_other_tensors_are_refused(tmp_path, changed, message):
    config, tensors, _ = recorded("llama")
    tensors = {name: array for name, array in (tensors | changed).items() if array is not None}
    with pytest.raises(UserError, match=message) as error:
        load_eagle3(written(tmp_path, config, tensors))
    assert "\n" not in str(error.value)


def test_heads_of_other_targets_are_refused_before_anything_is_compiled(
    tmp_path, layouts, count_compilations
):
    head, wide = load(f"eagle3:{layouts['authors']}", "float32"), target_of(width=24)
    config, tensors, _ = recorded("llama")
    names = config | {IDS: [2, 4, 9]}
    deep = load(f"eagle3:{written(tmp_path / 'deep', names, tensors)}", "float32")
    narrow_config = config | {"target_hidden_size": 24}
    fused = {"fc.weight": tensors["fc.weight"][:, : 3 * 24]}
    bare = {
        name: array for name, array in (tensors | fused).items() if name != "embed_tokens.weight"
    }
    narrow = load(f"eagle3:{written(tmp_path / 'narrow', narrow_config, bare)}", "float32")
    targets = [wide, target_of(layers=6), target_of(vocab_size=64), target_of(), wide]
    heads = [head, head, head, deep, narrow]
    errors = [
        "sees 32 features of its target, and 'target' shows 24",
        r"sees layers \(2, 3, 3\), but this target has 6",
        "have 60 and 64 tokens",
        r"sees layers \(2, 4, 9\), but this target has 7",
        "of width 32 without an embedding, and this target has none of that width",
    ]
    with count_compilations() as compiled:
        for target, draft, message in zip(targets, heads, errors, strict=True):
            with pytest.raises(UserError, match=message) as error:
                fitted(draft, target)
            assert "\n" not in str(error.value)
    assert not compiled
    with pytest.raises(UserError, match="takes its embedding from its target; load both with"):
        generate(jax.random.key(0), get_method("block"), target_of(), head, [[1]], [1], 2)
    own = load(f"eagle3:{layouts['angelslim']}", "float32")
    with pytest.raises(UserError, match="takes the layers that it sees from its target"):
        generate(jax.random.key(0), get_method("block"), target_of(), own, [[1]], [1], 2)
    with pytest.raises(UserError, match="no folder '/nowhere'; give eagle3:"):
        load("eagle3:/nowhere")
