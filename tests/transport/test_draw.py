"""`draw` samples tokens in proportion to their weights and uses all bits of the uniform."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.testing import chi_square
from spectr_jax.transport import draws

draw = jax.jit(draws.draw, static_argnums=2)  # One program per shape, not one per operation.


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_draw_follows_the_weights(size):
    weights = np.random.default_rng(size).gamma(0.7, size=size) * (np.arange(size) % 3 != 1)
    tokens = draw(jax.random.key(0), jnp.float32(weights), (50_000,))
    counts = np.bincount(tokens, minlength=size)
    assert not counts[weights == 0].any()
    assert chi_square.p_value(counts, weights) > 1e-4


@pytest.mark.parametrize("place", [0, 57, 99])
def test_draw_from_one_hot_weights_returns_that_token(place):
    weights = jnp.zeros(100).at[place].set(1e-30)
    assert np.all(draw(jax.random.key(0), weights, (1000,)) == place)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8_192])
def test_draw_from_zero_weights_returns_the_last_token(size):
    assert np.all(draw(jax.random.key(0), jnp.zeros(size), (100,)) == size - 1)


def test_draw_uses_all_bits_of_the_uniform(monkeypatch):
    """Four tokens of weight 2^-25 follow one of weight 1; a float32 uniform has steps of 2^-23."""
    weights = np.zeros(16, np.float32)
    weights[0], weights[4:8] = 1, 2.0**-25
    last_step = (np.uint32(2**23 - 1) << 9) + np.arange(512, dtype=np.uint32)
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.asarray(last_step))
    key = jax.random.key(0)
    # A new function makes jit trace again. Rounding can change a count by one.
    drawn = jax.jit(lambda weights: draws.draw(key, weights, (512,)))(weights)
    np.testing.assert_allclose(np.bincount(drawn)[4:8], 128, atol=1)
