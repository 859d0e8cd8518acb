"""Compares the best trees with all trees, and expected tokens with a simulation."""

import itertools

import numpy as np
import pytest

from spectr_jax.decoding import METHODS, Method, get_method
from spectr_jax.decoding.tree import Tree, batch, chain, optimal_tree, prefix_tree
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
def test_no_tree_beats_the_optimal_tree(size):
    rng = np.random.default_rng(size)
    trees, catalan = _all_trees(size), [1, 2, 5, 14, 42, 132]
    assert len(trees) == catalan[size - 1]
    for _ in range(10):
        R = _random_R(rng, 6)
        best = max(tree_search.expected_tokens(tree, R) for tree in trees)
        found = optimal_tree(R, size)
        assert tree_search.expected_tokens(found, R) == pytest.approx(best, abs=1e-12)


def test_extreme_acceptance_gives_a_chain_or_a_batch():
    assert optimal_tree([0.9, 0.05], 5) == chain(5)
    assert optimal_tree([0.21, 0.2, 0.2, 0.19], 4) == batch(4)


def test_expected_tokens_of_known_trees_are_exact():
    assert tree_search.expected_tokens(chain(3), [0.5]) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    halves = tree_search.expected_tokens(prefix_tree(2, 1), [0.5, 0.25])
    assert halves == pytest.approx(1 + 0.75 * 1.5)


def _carriers(most):
    """Returns a table of carriers. The acceptance of k drafts is 1 - 0.4 / k, and the number of
    drafts that carry the accepted token is geometric."""
    table = np.zeros((most + 1, most + 1))
    table[0, 0] = 1
    for k in range(1, most + 1):
        weights = 0.5 ** np.arange(k)
        table[k, 1 : k + 1] = weights / weights.sum() * (1 - 0.4 / k)
        table[k, 0] = 0.4 / k
    return table


def test_expected_tokens_of_iid_trees_match_a_simulation():
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


def test_no_shape_beats_the_best_prefix_tree():
    carriers = _carriers(14)
    found = list(tree_search.prefix_shapes(14, 3, 14))
    for branching in found:
        tree = prefix_tree(*branching)
        assert tree.size <= 14 and tree.height <= 3
        assert tree_search.branching_of(tree) == branching
    sizes = range(1, 15)
    every = {(a,) for a in sizes} | {(a, b) for a in sizes for b in sizes if a + a * b <= 14}
    shapes = itertools.product(sizes, repeat=3)
    every |= {(a, b, c) for a, b, c in shapes if a + a * b + a * b * c <= 14}
    assert set(found) == every and len(found) == len(every)
    tokens = {shape: tree_search.expected_tokens_iid(shape, carriers) for shape in found}
    best = tree_search.best_prefix_tree(carriers, 14, 3)
    assert tokens[best] == max(tokens.values())


def test_every_method_has_the_statistic_of_its_plan():
    named: dict = {}
    for name in METHODS:
        named.setdefault(tree_search.statistic(get_method(name)), set()).add(name)
    without_a_model = {"baseline", "lookup", "recycle", "self_speculative"}
    assert named.pop(None) == without_a_model | {
        *("greedy_drafts", "otm_layer", "traversal", "traversal_iid", "gbv")
    }
    assert named.pop("children") == {"gsd", "ersd"}
    assert {"block", "otm_block", "gbv_conditional", "spectr"} < named.pop("carriers")
    assert not named
    other = Method("other", batch(2), get_method("otm").verifier)
    assert tree_search.statistic(other) == "carriers"


def test_noisy_acceptance_is_made_descending():
    pooled = tree_search.descending([0.3, 0.4, 0.1, 0.2, 0.05])
    assert pooled == pytest.approx([0.35, 0.35, 0.15, 0.15, 0.05])
    assert tree_search.descending([0.3, 0.2]) == [0.3, 0.2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: optimal_tree([0.2, 0.3], 4), r"R=\[0\.2, 0\.3\]"),
        (lambda: optimal_tree([], 4), r"R=\[\]"),
        (lambda: optimal_tree([0.5], 0), "size=0"),
        (lambda: tree_search.expected_tokens(batch(3), [0.5, 0.2]), r"R=\[0\.5, 0\.2\]"),
        (lambda: tree_search.best_prefix_tree(_carriers(4), 5, 2), r"tree=\(5,\)"),
        (lambda: tree_search.expected_tokens_iid((3, 2), _carriers(4)), r"tree=\(3, 2\)"),
        (lambda: tree_search.branching_of(Tree((0, 0, 1))), r"parents=\(0, 0, 1\)"),
    ],
    ids=[
        "R ascends",
        "R is empty",
        "no nodes",
        "R is shorter than the number of children",
        "more nodes than measured drafts",
        "more live drafts than measured",
        "not a prefix tree",
    ],
)
def test_errors_name_the_bad_value(call, message):
    with pytest.raises(UserError, match=message):
        call()
