"""Builds small models of each kind of the Llama family."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.models.llama import Llama, LlamaConfig

SHAPE = LlamaConfig(
    layers=2, width=32, mlp=64, heads=4, kv_heads=2, head_width=8, vocab_size=300, context=64
)
SHAPES = {
    "llama": SHAPE,
    "tied": dataclasses.replace(SHAPE, tied=True, kv_heads=4, rope_theta=1e5),
    "qwen2": dataclasses.replace(SHAPE, qkv_bias=True, tied=True, rope_theta=1e6),
    "qwen3": dataclasses.replace(SHAPE, qk_norm=True, head_width=10, norm_epsilon=1e-6),
}


@pytest.fixture(scope="session")
def llamas():
    """Returns a model of each kind, with random biases and scales."""
    rng = np.random.default_rng(0)

    def noisy(leaf):
        return (
            leaf + jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype)
            if leaf.ndim == 1
            else leaf
        )

    models = {kind: Llama(shape, rngs=nnx.Rngs(0)) for kind, shape in SHAPES.items()}
    for model in models.values():
        nnx.update(model, jax.tree.map(noisy, nnx.state(model)))
    return models
