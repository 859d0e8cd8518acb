"""Tests ERSD's bounds on trees whose expected tokens are known."""

import math

import numpy as np
import pytest

from spectr_jax.decoding.tree import optimal_order, optimal_tree
from spectr_jax.experiments.figures import tunstall
from spectr_jax.experiments.planning.tree_search import expected_tokens


def test_the_entropy_includes_the_missing_mass():
    assert tunstall.entropy([0.5, 0.25, 0.25]) == pytest.approx(1.5)
    # The missing mass counts as one more index.
    assert tunstall.entropy([0.5]) == pytest.approx(1.0)
    assert tunstall.entropy([1.0]) == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [1, 4, 16, 64])
def test_optimal_trees_do_not_exceed_the_bounds(seed, size):
    """R has an entry for each of the 40 tokens. The lemma uses only the child indices that the
    optimal tree explores."""
    R = np.sort(np.random.default_rng(seed).dirichlet(np.full(40, 0.3)))[::-1].tolist()
    tokens = expected_tokens(optimal_tree(R, size), R)
    theorem, lemma = tunstall.theorem_4_1(R, 40, size), tunstall.lemma_4_2(R, size, 40)
    assert tokens <= lemma.bound(size) + 1e-9 and tokens <= theorem + 1e-9
    assert lemma.d == max(max(path) for path in optimal_order(R, size)) + 1
    # At N = 1, the m chosen for `size` is no better than the m chosen for N = 1.
    assert lemma.bound(1) >= tunstall.lemma_4_2(R, 1, 40).bound(1) - 1e-9


def test_lemma_4_2_matches_a_calculation_by_hand():
    """With R = (1/2, 1/4, ...) and N = 2 the optimal tree is a chain, so d = 1 and m is at least 1.
    The bound is (log2(1 + m) + log2(3)) / (1 + log2(m) / 2)."""
    best = min((math.log2(1 + m) + math.log2(3)) / (1 + 0.5 * math.log2(m)) for m in range(1, 64))
    lemma = tunstall.lemma_4_2([0.5, 0.25, 0.125], 2, 64)
    assert (lemma.d, lemma.bound(2)) == (1, pytest.approx(best))


def test_entropy_bounds_follow_from_the_divergence():
    assert tunstall.channel_bounds(3.0) == (3.0, 3.0 + 2.0 + 4.0)
