"""The distribution of the chain that GBV chooses equals enumeration over K chains."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding.verifiers import multipath
from spectr_jax.testing.methods import DRAFT, TARGET

VOCAB, LENGTH = 3, 2


def _p_and_q(path):
    """Returns the draft and target distributions after a path: (), (x,) or (x, y)."""
    context = (2, 3, *path)[-2:]
    p, q = DRAFT[context][:VOCAB], TARGET[context][:VOCAB]
    return p / p.sum(), q / q.sum()


def _chosen(chains):
    """Returns the lexicographically largest chain; tokens are ranked by q / p."""

    def ranks(chain):
        ratios = [np.divide(*_p_and_q(chain[:depth])[::-1]) for depth in range(LENGTH)]
        return tuple(ratio[token] for ratio, token in zip(ratios, chain, strict=True))

    return max(chains, key=ranks)


def _winner(p, q, beta, chains):
    ranked = multipath.ranked_by_ratio(jnp.float32(p), jnp.float32(q))
    return multipath.chosen_pmf(ranked, jnp.float32(beta), chains)


@functools.cache
def _chance(path):
    return np.prod([_p_and_q(path[:depth])[0][token] for depth, token in enumerate(path)])


@pytest.mark.parametrize("chains", [1, 2, 4])
def test_the_chosen_chain_has_the_enumerated_distribution(chains):
    paths = list(itertools.product(range(VOCAB), repeat=LENGTH))
    exact = np.zeros((VOCAB, VOCAB))
    for drawn in itertools.product(paths, repeat=chains):
        exact[_chosen(drawn)] += np.prod(list(map(_chance, drawn)))

    computed = np.zeros((VOCAB, VOCAB))
    first, below, upto = _winner(*_p_and_q(()), 0, chains)
    for token in range(VOCAB):
        second, _, _ = _winner(*_p_and_q((token,)), below[token] / upto[token], chains)
        computed[token] = first[token] * second
    np.testing.assert_allclose(computed, exact, rtol=1e-5)


@pytest.mark.parametrize("chains", [1, 2, 64])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1 - 2.0**-23, 1.0])
def test_winner_probabilities_sum_to_one_in_extreme_cases(beta, chains):
    p = jnp.float32([0.5, 0, 1e-30, 0.5 - 1e-6, 1e-6])
    q = jnp.float32([0, 0.25, 0.5, 1e-9, 0.25])
    g, below, upto = _winner(p, q, beta, chains)
    # A token with p = 0 ranks last and never wins.
    assert multipath.ranked_by_ratio(p, q).rank.tolist() == [0, 4, 3, 1, 2]
    assert g[1] == 0 and np.all(g >= 0) and np.sum(g) == pytest.approx(1, abs=chains * 1e-7)
    assert np.all(below <= upto)
    if beta == 1:  # All other paths rank below, so exactly one chain takes this path.
        np.testing.assert_allclose(g, p, rtol=1e-6)


def test_equal_ratios_are_ranked_by_token():
    pmf = jax.nn.softmax(jnp.arange(6.0))
    g, _, _ = _winner(pmf, pmf, 0, 3)
    np.testing.assert_array_equal(multipath.ranked_by_ratio(pmf, pmf).rank, np.arange(6))
    np.testing.assert_allclose(np.cumsum(g), np.cumsum(pmf) ** 3, rtol=1e-5)
