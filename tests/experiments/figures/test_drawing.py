"""Tests the pictures of draft trees."""

from spectr_jax.decoding.tree import prefix_tree
from spectr_jax.experiments.figures import drawing


def test_a_draft_tree_is_drawn_as_png(tmp_path):
    drawing.png(prefix_tree(2, 1), tmp_path / "tree.png", [1, 0.6, 0.2, 0.4, 0.1], "title")
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
