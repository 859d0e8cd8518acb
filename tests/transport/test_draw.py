"""`draw` samples tokens in proportion to their weights, and keeps the precision of small ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.testing import chi_square
from spectr_jax.transport import draws

draw = jax.jit(draws.draw, static_argnums=2)  # One program per shape, not one per operation.


@pytest.mark.parametrize("size", [1, 2, 5, 65, 100, 4_100, 9_000])
def test_draw_follows_the_weights(size):
    """One, two and three stages; blocks of weight 0, and a last block of few tokens."""
    weights = np.random.default_rng(size).gamma(0.7, size=size) * (np.arange(size) % 3 != 1)
    weights[64:128] = 0
    tokens = draw(jax.random.key(0), jnp.float32(weights), (50_000,))
    counts = np.bincount(tokens, minlength=size)
    assert not counts[weights == 0].any()
    assert chi_square.p_value(counts, weights) > 1e-4


@pytest.mark.parametrize("weight", [1e-30, 1.2e-38])
@pytest.mark.parametrize("places", [[0], [57], [99], [3, 5]])
def test_draw_from_tiny_weights_returns_only_their_tokens(places, weight):
    weights = np.zeros(100, np.float32)
    weights[places] = weight
    counts = np.bincount(draw(jax.random.key(0), weights, (3_000,)), minlength=100)
    np.testing.assert_allclose(counts, weights / weights.sum() * 3_000, atol=150)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_of_two_bytes_are_summed_in_float32(dtype):
    """Sums in bfloat16 would change tokens, and rates in float16 would be infinite."""
    weights = jnp.asarray(np.random.default_rng(0).random(200), dtype)
    narrow, wide = (
        draw(jax.random.key(0), each, (50_000,)) for each in (weights, weights.astype(jnp.float32))
    )
    np.testing.assert_array_equal(narrow, wide)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8_192])
def test_draw_from_zero_weights_returns_the_first_token(size):
    assert np.all(draw(jax.random.key(0), jnp.zeros(size), (100,)) == 0)


def test_uniforms_are_precise_near_0_and_below_1(monkeypatch):
    words = np.concatenate([np.arange(1_000), np.arange(0, 2**32, 99_991), [2**32 - 1]])
    monkeypatch.setattr(jax.random, "bits", lambda *_: jnp.asarray(words, jnp.uint32))
    uniforms = np.asarray(draws.uniform(jax.random.key(0)), float)
    np.testing.assert_allclose(uniforms, (words + 0.5) / 2**32, rtol=2.0**-23)
    assert uniforms.max() < 1


@pytest.mark.parametrize("rare", [0.4, 1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("rare_first", [True, False])
def test_a_race_counts_all_random_words(rare, rare_first, monkeypatch):
    """The probability of a rare token, enumerated: for each of many words of the other token, a
    binary search finds how many of its own 2^32 words win."""
    others = (np.arange(2**14) + 0.5) * 2**18
    own = 0 if rare_first else 1
    weights = jnp.float32([rare, 1 - rare] if rare_first else [1 - rare, rare])

    @jax.jit
    def wins(words):
        pair = jnp.stack([words, others.astype(np.uint32)], axis=1)
        monkeypatch.setattr(jax.random, "bits", lambda *_: pair if rare_first else pair[:, ::-1])
        return draws.draw(jax.random.key(0), weights, (len(others),)) == own

    low, high = np.zeros(len(others), np.int64), np.full(len(others), 2**32)
    for _ in range(33):  # The words below `low` win, and those from `high` on lose.
        middle, unknown = (low + high) // 2, low < high
        won = wins(np.minimum(middle, 2**32 - 1).astype(np.uint32))
        low, high = np.where(unknown & won, middle + 1, low), np.where(unknown & ~won, middle, high)
    assert np.all(low == high)
    exact = float(weights[own]) / np.sum(weights, dtype=float)
    assert np.mean(low / 2**32) == pytest.approx(exact, rel=5e-3)
