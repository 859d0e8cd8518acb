"""Tests the values of int8 products, and decoding with int8 models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax import check_model
from spectr_jax.loading.by_name import load
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers import cpu
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.quantized import Int8Linear, quantize, quantized
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError

SHAPE = TransformerConfig(layers=1, width=64, mlp=256, heads=4, vocab_size=29, context=48)


@pytest.fixture(scope="module")
def model():
    return Transformer(SHAPE, rngs=nnx.Rngs(0))


@jax.jit
def _logits(frozen, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return frozen.merge().extend(tokens, positions, causal(jnp.zeros(tokens.shape)))[0]


@pytest.fixture(params=["kernels", "xla", "accelerator"])
def kernels(request, monkeypatch):
    """Runs a test with the CPU kernels, without them, and with the program for accelerators."""
    if request.param == "kernels" and not cpu.kernels_in_use():
        pytest.skip("the CPU kernels are not in use")
    if request.param == "xla":
        monkeypatch.setattr(cpu, "kernels_in_use", lambda: False)
    if request.param == "accelerator":
        monkeypatch.setattr(backend, "on_cpu", lambda: False)
    jax.clear_caches()
    yield request.param
    jax.clear_caches()


def test_int8_layers_have_one_scale_per_output(kernels):
    linear = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    linear.bias[...] = jnp.arange(8.0)
    x = (
        np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)
        * np.array([1, 100, 0])[:, None]
    )
    kernel = np.asarray(linear.kernel[...], np.float64)
    scale = np.abs(kernel).max(0) / 127
    expected = x @ (np.round(kernel / scale) * scale) + np.arange(8)
    layer = Int8Linear(linear)
    # Without the kernels, XLA on a CPU would convert int8 in every call.
    assert layer.kernel[...].dtype == (jnp.float32 if kernels == "xla" else jnp.int8)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(layer(jnp.asarray(x[0, :1])), expected[0, :1], rtol=1e-4, atol=2e-3)


def test_quantized_models_are_close_and_follow_the_protocol(model):
    tokens = np.random.default_rng(1).integers(0, 29, (4, 20))
    exact, rounded = (
        np.asarray(_logits(freeze(each), tokens)) for each in (model, quantize(model))
    )
    assert 0 < np.std(rounded - exact) < 0.03 * np.std(exact)
    check_model(quantize(model), tolerance=1e-5)
    assert model.head.kernel[...].dtype == jnp.float32  # The original is unchanged.


def test_numpy_and_jax_quantize_to_the_same_bits():
    """NumPy quantizes models on a CPU. Halves of a row's maximum, as in bfloat16, are ties."""
    most = np.arange(64, 128, 2)[:, None]
    draws = np.random.default_rng(0).integers(-most, most + 1, (len(most), 300)) / 128
    rows = np.concatenate([draws, draws**3, np.zeros((1, 300))]).astype(np.float32)
    theirs = jax.jit(quantized)(jnp.asarray(rows))
    for ours, array in zip(quantized(rows), theirs, strict=True):
        assert isinstance(ours, np.ndarray) and ours.dtype == array.dtype
        np.testing.assert_array_equal(ours, array)
    whole, scale = quantized(rows)
    assert np.abs(whole).max() == 127 and not whole[-1].any()
    assert np.all(np.abs(whole * scale - rows) <= 0.50001 * scale)


def test_quantizing_a_quantized_model_is_refused(model):
    with pytest.raises(UserError, match="quantized already"):
        quantize(quantize(model))


def test_a_model_in_bfloat16_can_be_quantized(kernels):
    shape = dataclasses.replace(SHAPE, dtype="bfloat16")
    logits = _logits(freeze(quantize(Transformer(shape, rngs=nnx.Rngs(0)))), np.arange(5)[None])
    assert logits.dtype == jnp.float32 and jnp.all(jnp.isfinite(logits))


def test_published_models_load_in_int8():
    model = load("2m", "int8").model
    assert isinstance(model.blocks[0].up, Int8Linear) and model.head.kernel[...].shape == (
        8192,
        128,
    )
