"""Tests EAGLE-3 heads: recorded outputs of speculators, four layouts of one head, refused heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import names_in
from spectr_jax.loading.by_name import load
from spectr_jax.models import rotary
from spectr_jax.models.formats.eagle3 import load_eagle3
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import Llama, LlamaConfig, rotary_frequencies
from spectr_jax.models.quantized import quantize
from spectr_jax.utils.errors import UserError

heads = names_in("tests/references/heads.py")
weight, recorded, written, IDS = heads.weight, heads.recorded, heads.written, heads.IDS
HEADS = ("llama", "qwen3", "fc_norm", "whole")
WIDTH, VOCABULARY = 32, heads.VOCABULARY
SHAPE = {"width": WIDTH, "mlp": 48, "heads": 4, "kv_heads": 2, "head_width": 8}
TARGET = LlamaConfig(layers=9, **SHAPE, vocab_size=VOCABULARY, context=128)


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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2, 4, 6)),
        ({IDS: None}, (2, 4, 6)),
        ({IDS: [1, 2, 9]}, (1, 2, 9)),
        ({"eagle_config": {IDS: [1, 2, 8]}}, (2, 3, 9)),
        ({"eagle_config": {IDS: [0, 5, 7]}}, (1, 6, 8)),
        ({"eagle_config": {IDS: []}}, (2, 4, 6)),
    ],
)
def test_layers_are_those_of_the_target_from_1(tmp_path, fields, expected):
    config, tensors, _ = recorded("llama")
    head = load_eagle3(written(tmp_path, config | {IDS: None} | fields, tensors))
    assert head.completed(Llama(TARGET, rngs=nnx.Rngs(0))).feature_layers == expected


def test_a_head_reads_the_layers_of_its_target_and_not_its_last_state(tmp_path):
    """The default layers of a target are the states before its layers 2, L // 2 and L - 3, from 0."""
    config, tensors, _ = recorded("llama")
    target = Llama(TARGET, rngs=nnx.Rngs(0))
    head = load_eagle3(written(tmp_path, config, tensors)).completed(target)
    tokens = jnp.arange(6)[None]
    place = tokens, jnp.arange(6)[None], causal(jnp.zeros((1, 6)))
    shown, _ = target.hidden(*place, also=head.feature_layers)
    before, x = {}, target.embed(tokens)
    for index, block in enumerate(target.blocks):
        before[index] = x
        shape = rotary.turns(place[1], rotary_frequencies(target.config)), place[2], None, None
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
        ({"target_hidden_size": 48}, {}, "96 inputs, which are not 3 layers of width 48"),
        ({"fc_norm": True}, {}, r"lacks 'fc_norm.0.weight'"),
        ({IDS: 3}, {}, f"{IDS}=3: must be a list of layers"),
        ({IDS: [0, 2, 4]}, {}, rf"{IDS}=\[0, 2, 4\]: must be distinct layers"),
        ({IDS: [2, 2, 4]}, {}, "must be distinct layers"),
        ({IDS: [2, 4]}, {}, "96 inputs, which are not 2 layers of width 32"),
        ({}, SLIDING, r"layer_types=\['sliding_attention'\]: must be full_attention"),
        (
            {},
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "sliding_window": 3,
                "max_window_layers": 0,
            },
            "use_sliding_window=True: must be False",
        ),
        ({"target_hidden_size": 8}, {}, "width=32: must differ from the 4 states of width 8"),
        ({}, {"model_type": "gemma2"}, "model_type='gemma2': must be 'llama' or 'qwen3'"),
        ({}, {"attention_bias": True}, "attention_bias=True"),
        ({}, {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({}, {"hidden_size": 40}, "96 inputs, which are not 3 layers of width 40"),
        ({}, {"vocab_size": None}, "config.json without 'vocab_size'"),
        ({}, {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_type='ntk'"),
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
