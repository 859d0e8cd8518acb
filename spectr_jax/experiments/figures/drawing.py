"""Draws draft trees."""

import pathlib
from collections.abc import Sequence

from spectr_jax.decoding.tree import Tree
from spectr_jax.utils.files import write_figure
from spectr_jax.utils.layout import rows_of_paths


def png(tree: Tree, path: pathlib.Path, accepted: Sequence[float], title: str) -> None:
    """Draws the tree from left to right. The probabilities `accepted` [N + 1] colour its nodes."""
    from matplotlib.figure import Figure

    rows = rows_of_paths([tree.path(node) for node in range(tree.size + 1)])
    size = (1.6 + 1.1 * (tree.height + 1), 1.32 + 0.32 * rows.max())
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for node in range(1, tree.size + 1):
        ends = [tree.parent[node], node]
        axes.plot(tree.depth[ends], -rows[ends], color="0.6", linewidth=1, zorder=1)
    dots = axes.scatter(
        tree.depth, -rows, c=accepted, cmap="viridis", vmin=0, vmax=1, s=60, zorder=2
    )
    figure.colorbar(dots, ax=axes, label="probability of acceptance")
    axes.set_xticks(range(tree.height + 1))
    axes.set_yticks([])
    axes.set(xlabel="depth", title=title, xlim=(-0.3, tree.height + 0.5))
    write_figure(path, figure)
