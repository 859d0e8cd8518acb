"""Draft trees as text and as a picture."""

from spectr_jax.decoding.tree import prefix_tree
from spectr_jax.experiments.figures import drawing


def test_text():
    lines = ["0", "├─ 1", "│  └─ 3", "└─ 2", "   └─ 4"]
    assert drawing.text(prefix_tree(2, 1)) == "\n".join(lines)
    labels = ["root", "a", "b", "c", "d"]
    assert drawing.text(prefix_tree(2, 1), labels).splitlines()[2] == "│  └─ c"


def test_png(tmp_path):
    drawing.png(
        prefix_tree(2, 1),
        tmp_path / "tree.png",
        labels=list("rabcd"),
        accepted=[1, 0.6, 0.2, 0.4, 0.1],
    )
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")
