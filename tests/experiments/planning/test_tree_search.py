"""The best trees, against all trees; expected tokens, against simulation."""

import numpy as np
import pytest

from spectr_jax.decoding.tree import Tree, batch, chain, prefix_tree
from spectr_jax.experiments.planning import tree_search
from spectr_jax.utils.errors import UserError


def _all_trees(size):
    def grow(parents):
        if len(parents) == size:
            yield Tree(parents)
            return
        for parent in range(parents[-1] if parents else 0, len(parents) + 1):
            try:
                Tree((*parents, parent))
            except UserError:
                continue
            yield from grow((*parents, parent))

    return list(grow(()))


def _random_R(rng, children):
    return np.sort(rng.dirichlet(np.ones(children + 1))[:-1])[::-1].tolist()


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("height", [None, 2])
def test_the_optimal_tree_is_the_best_of_all(size, height):
    rng = np.random.default_rng(size)
    trees = [tree for tree in _all_trees(size) if height is None or tree.height <= height]
    assert (
        height or len(trees) == [1, 2, 5, 14, 42, 132][size - 1]
    )  # Catalan numbers: none is missing.
    for _ in range(10):
        R = _random_R(rng, 6)
        best = max(tree_search.expected_tokens(tree, R) for tree in trees)
        assert tree_search.expected_tokens(
            tree_search.optimal_tree(R, size, height), R
        ) == pytest.approx(best, abs=1e-12)


def test_extreme_acceptance():
    assert tree_search.optimal_tree([0.9, 0.05], 5) == chain(5)
    assert tree_search.optimal_tree([0.21, 0.2, 0.2, 0.19], 4) == batch(4)


def test_expected_tokens_of_known_trees():
    assert tree_search.expected_tokens(chain(3), [0.5]) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert tree_search.expected_tokens(prefix_tree(2, 1), [0.5, 0.25]) == pytest.approx(
        1 + 0.75 * 1.5
    )


def _carriers(most):
    """Acceptance 1 - 0.4 k^-1, and a geometric number of drafts that carry the token."""
    table = np.zeros((most + 1, most + 1))
    table[0, 0] = 1
    for k in range(1, most + 1):
        weights = 0.5 ** np.arange(k)
        table[k, 1 : k + 1] = weights / weights.sum() * (1 - 0.4 / k)
        table[k, 0] = 0.4 / k
    return table


def test_expected_tokens_of_iid_trees_by_simulation():
    carriers, branching, rng = _carriers(12), (3, 2, 2), np.random.default_rng(0)
    tokens = []
    for _ in range(20_000):
        live, emitted = 1, 1
        for children in branching:
            live = rng.choice(13, p=carriers[live * children])
            if not live:
                break
            emitted += 1
        tokens.append(emitted)
    exact = tree_search.expected_tokens_iid(branching, carriers)
    assert exact == pytest.approx(np.mean(tokens), abs=4 * np.std(tokens) / np.sqrt(len(tokens)))
    assert tree_search.expected_tokens_iid((1, 1), carriers) == pytest.approx(1 + 0.6 + 0.36)


def test_the_best_prefix_tree_is_the_best_of_all():
    carriers = _carriers(14)
    found = tree_search.best_prefix_trees(carriers, 14, 3, number=1000)
    assert len({candidate.branching for candidate in found}) == len(found)
    for candidate in found:
        tree = prefix_tree(*candidate.branching)
        assert candidate.nodes == tree.size <= 14 and tree.height <= 3
        assert candidate.tokens == pytest.approx(
            tree_search.expected_tokens_iid(candidate.branching, carriers), abs=1e-12
        )
        assert tree_search.branching_of(tree) == candidate.branching
    every = [
        (a, b, c)
        for a in range(1, 15)
        for b in range(1, 15)
        for c in range(1, 15)
        if a + a * b + a * b * c <= 14
    ]
    assert {candidate.branching for candidate in found if len(candidate.branching) == 3} == set(
        every
    )
    tokens = [candidate.tokens for candidate in found]
    assert tokens == sorted(tokens, reverse=True)


def test_descending():
    assert tree_search.descending([0.3, 0.4, 0.1, 0.2, 0.05]) == pytest.approx(
        [0.35, 0.35, 0.15, 0.15, 0.05]
    )
    assert tree_search.descending([0.3, 0.2]) == [0.3, 0.2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tree_search.optimal_tree([0.2, 0.3], 4),
            r"R=\[0\.2, 0\.3\] does not descend within \[0, 1\]",
        ),
        (lambda: tree_search.optimal_tree([], 4), r"R=\[\] does not descend"),
        (
            lambda: tree_search.optimal_tree([0.5], 4, 2),
            "no tree of 4 nodes has 1 children a node and height 2",
        ),
        (lambda: tree_search.optimal_tree([0.5], 0), "size=0"),
        (
            lambda: tree_search.expected_tokens(batch(3), [0.5, 0.2]),
            "R has 2 entries and some node 3 children",
        ),
        (
            lambda: tree_search.best_prefix_trees(_carriers(4), 5, 2),
            "carriers cover 4 drafts, fewer than the 5 nodes",
        ),
        (
            lambda: tree_search.expected_tokens_iid((3, 2), _carriers(4)),
            "may have 6 live drafts, measured are 4",
        ),
        (lambda: tree_search.branching_of(Tree((0, 0, 1))), "is no prefix tree"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(UserError, match=message):
        call()
