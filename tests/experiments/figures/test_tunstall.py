"""ERSD's bounds, against trees whose expected tokens are known."""

import math

import numpy as np
import pytest

from spectr_jax.experiments.figures import tunstall
from spectr_jax.experiments.planning.tree_search import expected_tokens, optimal_order, optimal_tree


def test_entropy():
    assert tunstall.entropy([0.5, 0.25, 0.25]) == pytest.approx(1.5)
    assert tunstall.entropy([0.5]) == pytest.approx(1.0)  # The rest is one more index.
    assert tunstall.entropy([1.0]) == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_no_tree_exceeds_its_bounds(seed, size):
    """R of a vocabulary of 40 is known in full; the lemma uses only the indices that the tree
    explores."""
    R = np.sort(np.random.default_rng(seed).dirichlet(np.full(40, 0.3)))[::-1].tolist()
    tokens = expected_tokens(optimal_tree(R, size), R)
    theorem, lemma = tunstall.theorem_4_1(R, 40, size), tunstall.lemma_4_2(R, size, 40)
    assert tokens <= lemma.bound(size) + 1e-9 and tokens <= theorem + 1e-9
    assert lemma.d == max(max(path) for path in optimal_order(R, size)) + 1
    # The best m for N is not the best for 1.
    assert lemma.bound(1) >= tunstall.lemma_4_2(R, 1, 40).bound(1) - 1e-9


def test_the_lemma_by_hand():
    """R = (1/2, 1/4, ...), N = 2: the tree is a chain, d = 1, m at least 1; (log2(1 + m) + log2(3))
    / (1 + log2(m) / 2)."""
    best = min((math.log2(1 + m) + math.log2(3)) / (1 + 0.5 * math.log2(m)) for m in range(1, 64))
    lemma = tunstall.lemma_4_2([0.5, 0.25, 0.125], 2, 64)
    assert (lemma.d, lemma.bound(2)) == (1, pytest.approx(best))


def test_channel_bounds():
    assert tunstall.channel_bounds(3.0) == (3.0, 3.0 + 2.0 + 4.0)
