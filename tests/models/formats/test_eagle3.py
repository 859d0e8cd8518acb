"""Tests EAGLE-3 heads: recorded outputs of speculators, four layouts of one head, refused heads."""

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

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.loading.by_name import Trained, load
from spectr_jax.loading.pairs import fitted
from spectr_jax.models.cache import Cache
from spectr_jax.models.formats.eagle3 import load_eagle3
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import Llama, LlamaConfig
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
