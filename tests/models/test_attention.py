"""Compares attention, in the forms that are fast on a CPU, with JAX's own attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.models.layers.attention import attention

HEADS = 6


def jax_attention(q, k, v, mask):
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


@pytest.mark.parametrize("tokens", [1, 5, 50])
@pytest.mark.parametrize("kv_heads", [1, 3, 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_equals_dot_product_attention_of_jax(dtype, kv_heads, tokens):
    rng = np.random.default_rng(0)
    shapes = ((2, tokens, HEADS, 8), (2, 9, kv_heads, 8), (2, 9, kv_heads, 8))
    q, k, v = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    mask = jnp.asarray(rng.random((2, tokens, 9)) < 0.5).at[:, :, 0].set(True)
    expected, made = (jax.jit(form)(q, k, v, mask) for form in (jax_attention, attention))
    assert made.dtype == expected.dtype == dtype
    assert float(jnp.abs(made - expected).max()) < {"float32": 1e-6, "bfloat16": 2e-2}[dtype]


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_gradients_equal_those_of_jax_attention(kv_heads):
    rng = np.random.default_rng(1)
    shapes = ((2, 50, HEADS, 8), (2, 50, kv_heads, 8), (2, 50, kv_heads, 8), (2, 50, HEADS, 8))
    q, k, v, direction = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    mask = jnp.tril(jnp.ones((2, 50, 50), bool))

    def gradients(form):
        of = jax.grad(lambda *qkv: jnp.sum(direction * form(*qkv, mask)), argnums=(0, 1, 2))
        return jax.jit(of)(q, k, v)

    for expected, made in zip(gradients(jax_attention), gradients(attention), strict=True):
        np.testing.assert_allclose(made, expected, atol=1e-5)
