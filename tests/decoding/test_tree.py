import numpy as np
import pytest

from spectr_jax.decoding import tree
from spectr_jax.errors import UserError


def test_iid_chains():
    shape = tree.iid_chains(2, 3)
    assert shape.parents == (0, 0, 1, 2, 3, 4)
    assert shape.height == 3 and shape.size == 6
    np.testing.assert_array_equal(shape.depth, [0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(shape.sibling_rank, [0, 0, 1, 0, 0, 0, 0])
    np.testing.assert_array_equal(np.flatnonzero(shape.ancestors[6]), [0, 2, 4, 6])
    np.testing.assert_array_equal(shape.level_table, [[0, -1], [1, 2], [3, 4], [5, 6], [-1, -1]])


def test_a_chain_is_one_draft():
    assert tree.chain(3) == tree.iid_chains(1, 3)
    assert tree.chain(3).parents == (0, 1, 2)


def test_none():
    assert tree.none().height == 0 and tree.none().level_table.shape == (2, 1)


@pytest.mark.parametrize("parents", [(1,), (0, 2), (0, 1, 0)])
def test_bad_order(parents):
    with pytest.raises(UserError):
        tree.Tree(parents)
