"""Models by name: weights that were never trained. Trained ones are loaded in the tests of the tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.errors import UserError
from spectr_jax.experiments.loading import load_trained
from spectr_jax.models.transformer import causal


def _laws(model, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.nn.softmax(model.extend(jnp.asarray(tokens), positions, causal(jnp.zeros(tokens.shape)))[0])


def test_random_models_are_the_same_each_time_and_agree_in_0_7_of_their_drafts():
    first, again = (load_trained("random:draft_2m").model for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(first), nnx.state(again))
    narrow = load_trained("random:draft_20m", "bfloat16").model
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(narrow))} == {jnp.dtype("bfloat16")}
    tokens = np.random.default_rng(0).integers(0, 8192, (2, 16))
    overlap = jnp.sum(jnp.minimum(_laws(first, tokens), _laws(narrow, tokens)), axis=-1)
    assert 0.65 < float(jnp.mean(overlap)) < 0.8


def test_an_unknown_shape_is_named():
    with pytest.raises(UserError, match=r"unknown shape 'draft_1m'.*draft_2m"):
        load_trained("random:draft_1m")
