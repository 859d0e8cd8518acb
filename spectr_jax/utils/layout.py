"""Where to draw the nodes of a tree."""

from collections.abc import Sequence

import numpy as np


def rows_of_paths(paths: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Returns the row in which to draw each node, from top to bottom, so that no edges cross.

    Each leaf has a row of its own; other nodes are centred on their children.

    Args:
      paths: paths of all nodes in any order, as child indices from the root; the root's is empty.
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
