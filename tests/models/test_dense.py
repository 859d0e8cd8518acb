"""Tests linear layers, which compute few rows and many rows by different products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.models.layers.cpu import FEW, kernels_in_use
from spectr_jax.models.layers.dense import dense_layer, with_halved_kernels
from spectr_jax.utils import backend

pytestmark = pytest.mark.defaults


def _linear(inputs, outputs):
    return dense_layer(inputs, outputs, use_bias=False, dtype=jnp.float32, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("rows", [1, 2, FEW, FEW + 1, 40])
def test_linear_layers_and_their_gradients_equal_float64(rows, on_cpu, monkeypatch):
    monkeypatch.setattr(backend, "on_cpu", lambda: on_cpu)
    linear = _linear(512, 1024)
    x, g = (
        jax.random.normal(key, (rows, width))
        for key, width in zip(jax.random.split(jax.random.key(0)), (512, 1024), strict=True)
    )
    kernel = np.asarray(linear.kernel[...], np.float64)
    np.testing.assert_allclose(
        jax.jit(linear)(x), np.asarray(x, np.float64) @ kernel, rtol=1e-4, atol=1e-5
    )
    graphdef, state = nnx.split(linear)
    by_kernel, by_x = jax.grad(
        lambda state, x: jnp.sum(nnx.merge(graphdef, state)(x) * g), argnums=(0, 1)
    )(state, x)
    np.testing.assert_allclose(by_x, np.asarray(g, np.float64) @ kernel.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        by_kernel["kernel"][...], np.asarray(x, np.float64).T @ np.asarray(g), rtol=1e-4, atol=1e-4
    )


@pytest.mark.skipif(not kernels_in_use(), reason="the CPU kernels are not in use")
def test_a_few_tokens_have_the_same_bits_as_each_alone():
    """Ties between logits are then broken as in the baseline, however many tokens a call has."""
    linear = jax.jit(_linear(512, 1024))
    x = jax.random.normal(jax.random.key(1), (FEW, 512))
    assert jnp.array_equal(linear(x), jnp.concatenate([linear(row[None]) for row in x]))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="this form is only for CPUs")
def test_each_gradient_is_one_product_over_all_tokens():
    """The output and both gradients take one product each, even for few sequences."""
    graphdef, state = nnx.split(_linear(512, 1024))
    gradient = jax.grad(lambda x: jnp.sum(nnx.merge(graphdef, state)(x)))
    assert str(jax.make_jaxpr(gradient)(jnp.zeros((FEW, 64, 512)))).count("dot_general[") == 3


@pytest.mark.parametrize("rows", [1, FEW, 40])
def test_kernels_are_halved_only_where_lossless(rows):
    linear = _linear(512, 1024)
    linear.kernel[...] = linear.kernel[...].astype(jnp.bfloat16).astype(jnp.float32)
    x = jax.random.normal(jax.random.key(2), (rows, 512))
    before = linear(x)
    model = with_halved_kernels(nnx.List([linear, _linear(3, 5)]))
    assert [layer.kernel[...].dtype for layer in (*model, linear)] == [
        jnp.bfloat16,
        jnp.float32,
        jnp.float32,
    ]
    np.testing.assert_array_equal(model[0](x), before)
