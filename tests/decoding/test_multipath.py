"""The distribution of the chain that greedy multi-path block verification chooses, against all draws of K chains."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding.verifiers import multipath
from spectr_jax.testing.methods import DRAFT, TARGET

VOCAB, LENGTH = 3, 2


def _p_and_q(path):
    """Draft and target after a path [(), (x,) or (x, y)], over three tokens."""
    context = (2, 3, *path)[-2:]
    p, q = DRAFT[context][:VOCAB], TARGET[context][:VOCAB]
    return p / p.sum(), q / q.sum()


def _chosen(chains):
    """The largest chain in the order of dictionaries, tokens ranked by q / p after each prefix."""

    def ranks(chain):
        ratios = [np.divide(*_p_and_q(chain[:depth])[::-1]) for depth in range(LENGTH)]
        return tuple(ratio[token] for ratio, token in zip(ratios, chain, strict=True))

    return max(chains, key=ranks)


def _winner(p, q, beta, chains):
    return multipath.winner_pmf(multipath.ranked_by_ratio(p, q), beta, chains)


@pytest.mark.parametrize("chains", [1, 2, 4])
def test_the_chosen_chain_has_its_pmf(chains):
    paths = list(itertools.product(range(VOCAB), repeat=LENGTH))
    chance = {
        path: np.prod([_p_and_q(path[:depth])[0][token] for depth, token in enumerate(path)])
        for path in paths
    }
    exact = np.zeros((VOCAB, VOCAB))
    for drawn in itertools.product(paths, repeat=chains):
        exact[_chosen(drawn)] += np.prod([chance[path] for path in drawn])

    computed = np.zeros((VOCAB, VOCAB))
    first, below, upto = _winner(*map(jnp.float32, _p_and_q(())), jnp.float32(0), chains)
    for token in range(VOCAB):
        beta = below[token] / upto[token]
        computed[token] = (
            first[token] * _winner(*map(jnp.float32, _p_and_q((token,))), beta, chains)[0]
        )
    np.testing.assert_allclose(computed, exact, rtol=1e-5)


@pytest.mark.parametrize("chains", [1, 2, 64])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1 - 2.0**-23, 1.0])
def test_it_is_a_distribution_at_the_edges(beta, chains):
    p = jnp.float32([0.5, 0, 1e-30, 0.5 - 1e-6, 1e-6])
    q = jnp.float32([0, 0.25, 0.5, 1e-9, 0.25])
    g, below, upto = _winner(p, q, jnp.float32(beta), chains)
    assert list(multipath.ranked_by_ratio(p, q).rank) == [
        0,
        4,
        3,
        1,
        2,
    ]  # Tokens that are never drafted come last, and never win.
    assert g[1] == 0 and np.all(g >= 0) and np.sum(g) == pytest.approx(1, abs=chains * 1e-7)
    assert np.all(below <= upto)
    if beta == 1:  # All others rank below: the path has but one chain.
        np.testing.assert_allclose(g, p, rtol=1e-6)


def test_ties_are_ranked_by_token():
    pmf = jax.nn.softmax(jnp.arange(6.0))
    g, _, _ = _winner(pmf, pmf, jnp.float32(0), 3)
    np.testing.assert_array_equal(multipath.ranked_by_ratio(pmf, pmf).rank, np.arange(6))
    np.testing.assert_allclose(np.cumsum(g), np.cumsum(pmf) ** 3, rtol=1e-5)
