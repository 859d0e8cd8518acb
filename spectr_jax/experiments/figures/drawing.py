"""Draws draft trees."""

import pathlib
from collections.abc import Sequence

import numpy as np

from spectr_jax.decoding.tree import Tree
from spectr_jax.utils.files import write_figure


def rows_of_paths(paths: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Returns the row of each node, from top to bottom, so that no edges cross.

    Each leaf has a row of its own; other nodes are centred on their children.

    Args:
      paths: paths of all nodes in any order, as in `Tree.path`; the root's is empty.
    """
    order = {path: place for place, path in enumerate(paths)}
    children: dict[tuple[int, ...], list[int]] = {}
    for path in sorted(paths):
        if path:
            children.setdefault(path[:-1], []).append(order[path])
    leaves = [path for path in sorted(paths) if path not in children]
    rows = np.zeros(len(paths))
    rows[[order[leaf] for leaf in leaves]] = np.arange(len(leaves))
    for path in sorted(children, key=len, reverse=True):
        rows[order[path]] = rows[children[path]].mean()
    return rows


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
