"""Draft trees: static shapes, known at compile time.

Node 0 is the root, the last committed token. Drafted nodes are 1..N, level by level, so a parent's number is always
below its child's.
"""

import dataclasses
import functools

import numpy as np

from spectr_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Tree:
    """A draft tree.

    Attributes:
      parents: the parent of each drafted node 1..N, in order of depth.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        depths = [0]
        for node, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < node:
                raise UserError(f"node {node} has parent {parent}; number parents below their children")
            depths.append(depths[parent] + 1)
        if depths != sorted(depths):
            raise UserError(f"a tree with depths {depths} is not in order; number its nodes level by level")

    @property
    def size(self) -> int:
        """N, the number of drafted nodes."""
        return len(self.parents)

    @functools.cached_property
    def parent(self) -> np.ndarray:
        """[N + 1]; the root is its own parent."""
        return np.array((0, *self.parents))

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """[N + 1] int32; 0 for the root."""
        depth = np.zeros(self.size + 1, np.int32)
        for node in range(1, self.size + 1):
            depth[node] = depth[self.parent[node]] + 1
        return depth

    @property
    def height(self) -> int:
        """The longest path, in drafted nodes."""
        return int(self.depth[-1])

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """[N + 1, N + 1] bool; entry (i, j): j is i or an ancestor of i."""
        ancestors = np.eye(self.size + 1, dtype=bool)
        for node in range(1, self.size + 1):
            ancestors[node] |= ancestors[self.parent[node]]
        return ancestors

    @functools.cached_property
    def levels(self) -> tuple[np.ndarray, ...]:
        """The nodes of each depth 0..height."""
        return tuple(np.flatnonzero(self.depth == depth) for depth in range(self.height + 1))

    @functools.cached_property
    def sibling_rank(self) -> np.ndarray:
        """[N + 1]; which child of its parent a node is."""
        return np.array([0] + [self.parents[: node - 1].count(self.parents[node - 1]) for node in range(1, self.size + 1)])

    @functools.cached_property
    def level_table(self) -> np.ndarray:
        """[height + 2, W] int32: the nodes of each level, padded with -1; the row behind the last level is empty."""
        table = np.full((self.height + 2, max(map(len, self.levels))), -1, np.int32)
        for depth, nodes in enumerate(self.levels):
            table[depth, : len(nodes)] = nodes
        return table


def none() -> Tree:
    """No drafts: one token a call, from the target alone."""
    return Tree(())


def chain(length: int) -> Tree:
    """One draft of `length` tokens (speculative decoding)."""
    return iid_chains(1, length)


def iid_chains(drafts: int, length: int) -> Tree:
    """`drafts` chains of `length` tokens that part at the root (SpecTr, eq. 7)."""
    for name, value in (("num_drafts", drafts), ("draft_length", length)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}={value!r} is not a whole number of at least 1; give one")
    first = (0,) * drafts
    return Tree(first + tuple(range(1, drafts * (length - 1) + 1)))
