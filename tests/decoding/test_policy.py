"""`probabilities` returns the distribution that a policy makes of logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding.policy import Policy, probabilities

LOGITS = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Policy(), [0.1, 0.4, 0.2, 0.3]),
        (Policy(temperature=0.5), np.array([0.01, 0.16, 0.04, 0.09]) / 0.3),
        (Policy(temperature=0.0), [0, 1, 0, 0]),
        (Policy(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (Policy(top_k=9), [0.1, 0.4, 0.2, 0.3]),
        (Policy(top_p=0.65), [0, 4 / 7, 0, 3 / 7]),
        (Policy(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Policy(top_p=1e-6), [0, 1, 0, 0]),
        (Policy(top_k=3, top_p=0.7), [0, 4 / 7, 0, 3 / 7]),
    ],
    ids=[
        "defaults",
        "temperature 0.5",
        "temperature 0",
        "top_k 2",
        "top_k above the vocabulary",
        "top_p 0.65",
        "top_p 0.75",
        "tiny top_p",
        "top_k and top_p",
    ],
)
def test_temperature_and_limits_give_the_expected_probabilities(policy, expected):
    np.testing.assert_allclose(probabilities(LOGITS, policy), expected, atol=1e-6)


def test_greedy_takes_the_first_of_equal_logits():
    pmfs = probabilities(jnp.zeros((2, 3)), Policy(temperature=0.0))
    np.testing.assert_array_equal(pmfs, [[1, 0, 0]] * 2)


@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy(temperature=0.0), Policy(top_k=2), Policy(temperature=0.0, top_p=0.5)],
    ids=["defaults", "greedy", "top_k", "greedy with top_p"],
)
def test_nan_logits_give_no_token_a_positive_probability(policy):
    pmfs = probabilities(jnp.array([[0.0, 1.0, 2.0], [0.0, jnp.nan, 2.0]]), policy)
    assert np.isfinite(pmfs[0]).all()
    assert not (pmfs[1] > 0).any()


def test_vmap_over_temperatures_equals_separate_calls():
    def at(temperature):
        return probabilities(LOGITS, Policy(temperature=temperature))

    temperatures = [0.0, 0.5, 1.0]
    expected = jnp.stack([at(temperature) for temperature in temperatures])
    np.testing.assert_allclose(jax.vmap(at)(jnp.array(temperatures)), expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-8, 1e-10, 1e-37])
@pytest.mark.parametrize("size", [5, 13, 300])
@pytest.mark.optimized
def test_a_tiny_temperature_is_greedy(size, temperature):
    logits = 100 + 30 * np.random.default_rng(size).normal(size=(200, size))
    pmfs = jax.jit(probabilities)(jnp.float32(logits), Policy(temperature=temperature, top_p=0.9))
    np.testing.assert_array_equal(pmfs, np.eye(size)[logits.argmax(axis=1)])
