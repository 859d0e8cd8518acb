"""Draft trees: their tables, their names, and the limit of their size."""

import numpy as np
import pytest

from spectr_jax.decoding import tree
from spectr_jax.utils.errors import UserError


def test_iid_chains_are_numbered_level_by_level():
    shape = tree.iid_chains(2, 3)
    assert shape.parents == (0, 0, 1, 2, 3, 4)
    assert shape.height == 3 and shape.size == 6
    np.testing.assert_array_equal(shape.depth, [0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(shape.sibling_rank, [0, 0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(np.flatnonzero(shape.ancestors[6]), [0, 2, 4, 6])
    np.testing.assert_array_equal(shape.level_table, [[0, -1], [1, 2], [3, 4], [5, 6], [-1, -1]])


def test_prefix_trees_have_the_given_branching():
    shape = tree.prefix_tree(2, 3, 1)
    assert [len(level) for level in shape.levels] == [1, 2, 6, 6]
    np.testing.assert_array_equal(shape.children_table[1], [3, 4, 5])
    np.testing.assert_array_equal(shape.children_table[2], [6, 7, 8])
    np.testing.assert_array_equal(shape.inner, range(9))
    assert tree.batch(4) == tree.prefix_tree(4) and tree.iid_chains(3, 2) == tree.prefix_tree(3, 1)


@pytest.mark.parametrize(
    ("size", "levels"), [(1, [1, 1]), (2, [1, 1, 1]), (4, [1, 1, 1, 2]), (9, [1, 1, 1, 3, 3, 1])]
)
def test_specinfer_trees_branch_only_after_two_tokens(size, levels):
    shape = tree.specinfer(size)
    assert shape.size == size and [len(level) for level in shape.levels] == levels
    children = [np.sum(shape.parent[1:] == node) for node in range(size + 1)]
    assert all(count <= (3 if node == 2 else 1) for node, count in enumerate(children))


def test_tables_list_the_children_of_an_irregular_tree():
    shape = tree.Tree((0, 0, 1, 2, 2, 4, 5))
    np.testing.assert_array_equal(shape.inner, [0, 1, 2, 4, 5])
    np.testing.assert_array_equal(shape.inner_rank[shape.inner], range(5))
    children = [[1, 2], [3, -1], [4, 5], [-1, -1], [6, -1], [7, -1], [-1, -1], [-1, -1]]
    np.testing.assert_array_equal(shape.children_table, children)


def test_parse_reads_every_notation_and_refuses_unknown_ones():
    shapes = {"4,2,1": tree.prefix_tree(4, 2, 1), "3": tree.batch(3), "batch:5": tree.batch(5)}
    shapes |= {"4x2": tree.iid_chains(4, 2), "1x3": tree.chain(3), "chain:3": tree.chain(3)}
    for spec, shape in shapes.items():
        assert tree.parse(spec) == shape
    assert tree.parse(tree.chain(2)) == tree.chain(2)
    assert tree.parse(tree.spelled((4, 2, 1))) == tree.prefix_tree(4, 2, 1)
    for spec in ("", "star:3", "chain:3,2", "4;2", "4x", "x2", "4xx2", "2x2,1"):
        with pytest.raises(UserError, match=f"tree='{spec}': is unknown"):
            tree.parse(spec)


def test_the_tree_without_drafts_has_height_zero():
    assert tree.none().height == 0 and tree.none().level_table.shape == (2, 1)


@pytest.mark.parametrize("parents", [(1,), (0, 2), (0, 1, 0)], ids=str)
def test_nodes_out_of_order_are_refused(parents):
    with pytest.raises(UserError, match="parents"):
        tree.Tree(parents)


def test_trees_accept_lists_and_numpy_integers():
    assert tree.Tree([0, np.int64(0), 1]) == tree.Tree((0, 0, 1))
    assert hash(tree.Tree([0])) == hash(tree.Tree((0,)))
    assert tree.iid_chains(np.int64(2), 3) == tree.iid_chains(2, 3)
    assert tree.Tree(tuple(range(10_000))).sibling_rank.max() == 0  # Takes linear time.


@pytest.mark.parametrize(
    "spec", ["100000x100000", "3,1000000000000", "chain:1000000000000", "specinfer:1000000000000"]
)
def test_a_tree_that_exceeds_memory_is_refused_before_it_is_built(spec):
    with pytest.raises(UserError, match=rf"^tree='{spec}': a tree of [\d,]+ nodes is too large"):
        tree.parse(spec)
