import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from spectr_jax.models.gpt2 import save_gpt2
from spectr_jax.models.transformer import Transformer, TransformerConfig, causal

SHAPE = TransformerConfig(layers=2, width=16, mlp=40, heads=2, vocab_size=29, context=12)


@pytest.fixture(scope="module")
def model():
    """Biases are zero and scales one where a model starts: noise tells them apart."""
    model = Transformer(SHAPE, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(state))))
    nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(next(keys), leaf.shape), state))
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2") / "made"
    save_gpt2(folder, model)
    return folder


def _gpt2_logits(config, tensors, tokens_N):
    """GPT-2 as Hugging Face computes it, from its names for config fields and tensors; logits [N, V]."""
    heads, N = config["n_head"], len(tokens_N)

    def conv1d(name, x):
        return x @ tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def norm(name, x):
        x = x - x.mean(-1, keepdims=True)
        scaled = x / np.sqrt((x**2).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
        return scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    def attend(name, x):
        q, k, v = (part.reshape(N, heads, -1).swapaxes(0, 1) for part in np.split(conv1d(f"{name}.c_attn", x), 3, -1))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        weights = np.exp(np.where(np.tri(N, dtype=bool), scores, -np.inf))
        mixed = weights / weights.sum(-1, keepdims=True) @ v
        return conv1d(f"{name}.c_proj", mixed.swapaxes(0, 1).reshape(N, -1))

    def gelu_new(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = tensors["transformer.wte.weight"][tokens_N] + tensors["transformer.wpe.weight"][:N]
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        x = x + attend(f"{at}.attn", norm(f"{at}.ln_1", x))
        x = x + conv1d(f"{at}.mlp.c_proj", gelu_new(conv1d(f"{at}.mlp.c_fc", norm(f"{at}.ln_2", x))))
    return norm("transformer.ln_f", x) @ tensors["lm_head.weight"].T + tensors["lm_head.bias"]


def test_gpt2_computes_our_logits(model, folder):
    tokens = np.random.default_rng(0).integers(0, SHAPE.vocab_size, (1, SHAPE.context))
    positions = np.arange(SHAPE.context)[None]
    ours, _ = model.extend(jnp.asarray(tokens), jnp.asarray(positions), causal(jnp.zeros(tokens.shape)))
    config = json.loads((folder / "config.json").read_text())
    theirs = _gpt2_logits(config, safetensors.numpy.load_file(folder / "model.safetensors"), tokens[0])
    np.testing.assert_allclose(ours[0], theirs, atol=1e-4)


def test_the_config_has_the_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    shape = {"n_layer": 2, "n_embd": 16, "n_inner": 40, "n_head": 2, "vocab_size": 29, "n_positions": 12}
    assert shape.items() <= config.items()
    assert config["model_type"] == "gpt2" and config["architectures"] == ["GPT2LMHeadModel"]
    assert config["activation_function"] == "gelu_new" and config["layer_norm_epsilon"] == 1e-6
    assert config["tie_word_embeddings"] is False and config["eos_token_id"] is None
    assert config["attn_pdrop"] == config["embd_pdrop"] == config["resid_pdrop"] == 0


def test_a_folder_of_two_whole_float32_files(model, folder):
    """A model in bfloat16 is written in float32 too; no part of a write is left."""
    narrow = nnx.merge(nnx.graphdef(model), jax.tree.map(lambda leaf: leaf.astype("bfloat16"), nnx.state(model)))
    save_gpt2(folder.with_name("narrow"), narrow)
    for made in (folder, folder.with_name("narrow")):
        assert {path.name for path in made.iterdir()} == {"config.json", "model.safetensors"}
        tensors = safetensors.numpy.load_file(made / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {np.dtype("float32")}
