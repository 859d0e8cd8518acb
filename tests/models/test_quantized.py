"""Eight-bit products: what they compute, and that decoding with them is as exact as with any model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax import check_model
from spectr_jax.decoding import Policy, generate, get_method
from spectr_jax.errors import UserError
from spectr_jax.loading import load
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.quantized import Int8Linear, quantize
from spectr_jax.models.transformer import Transformer, TransformerConfig

SHAPE = TransformerConfig(layers=1, width=64, mlp=256, heads=4, vocab_size=29, context=48)


@pytest.fixture(scope="module")
def model():
    return Transformer(SHAPE, rngs=nnx.Rngs(0))


@jax.jit
def _logits(frozen, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return frozen.merge().extend(tokens, positions, causal(jnp.zeros(tokens.shape)))[0]


def test_a_layer_rounds_weights_by_output_and_activations_by_token():
    linear = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    linear.bias[...] = jnp.arange(8.0)
    x = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32) * np.array([1, 100, 0])[:, None]
    kernel = np.asarray(linear.kernel[...], np.float64)
    weight_scale, token_scale = np.abs(kernel).max(0) / 127, np.maximum(np.abs(x).max(-1, keepdims=True), 1e-30) / 127
    expected = np.round(x / token_scale) @ np.round(kernel / weight_scale) * token_scale * weight_scale + np.arange(8)
    np.testing.assert_allclose(Int8Linear(linear)(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(Int8Linear(linear)(jnp.asarray(x[0, :1])), expected[0, :1], rtol=1e-5, atol=1e-5)


def test_logits_stay_close_and_tokens_do_not_meet(model):
    tokens = np.random.default_rng(1).integers(0, 29, (4, 20))
    exact, rounded = (np.asarray(_logits(freeze(each), tokens)) for each in (model, quantize(model)))
    assert 0 < np.std(rounded - exact) < 0.03 * np.std(exact)
    check_model(quantize(model), tolerance=1e-5)
    assert model.head.kernel[...].dtype == jnp.float32  # The original is as it was.


def test_a_quantized_model_is_not_quantized_again(model):
    with pytest.raises(UserError, match="a kernel of int8 cannot be quantized; give a model in float32 or bfloat16"):
        quantize(quantize(model))


@pytest.mark.slow
def test_greedy_equals_the_baseline(model):
    target, draft = quantize(model), quantize(Transformer(SHAPE, rngs=nnx.Rngs(1)))
    prompts, policy = np.random.default_rng(0).integers(0, 29, (3, 4)), Policy(temperature=0.0)
    first, second = (
        generate(jax.random.key(0), get_method(name, **options), target, draft, prompts, [4, 2, 3], 16, policy).tokens
        for name, options in (("baseline", {}), ("otm_block", {"tree": "2,1"}))
    )
    np.testing.assert_array_equal(first[:, :20], second[:, :20])


def test_models_load_in_int8():
    model = load("embedded:draft_2m", "int8").model
    assert model.blocks[0].up.kernel[...].dtype == jnp.int8 and model.head.kernel[...].shape == (8192, 128)
