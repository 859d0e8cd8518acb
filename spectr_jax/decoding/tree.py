"""Draft trees: static shapes, known at compile time.

Node 0 is the root, the last committed token. Drafted nodes are 1..N, level by level, so a parent's number is always
below its child's.
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int

from spectr_jax.utils.errors import UserError

MOST_NODES = 10_000
"""A square matrix of so many is made for the mask; trees that pay have dozens."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """A draft tree.

    Attributes:
      parents: the parent of each drafted node 1..N, in order of depth.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not all(isinstance(parent, numbers.Integral) for parent in self.parents):
            raise UserError(
                f"parents={self.parents!r:.60}: must be whole numbers; give the parent of each node 1..N"
            )
        object.__setattr__(self, "parents", tuple(map(int, self.parents)))  # Trees are hashed.
        _check_size(len(self.parents))
        depths = [0]
        for node, parent in enumerate(self.parents, start=1):
            if not 0 <= parent < node:
                raise UserError(
                    f"node {node} has parent {parent}; a parent's number must be smaller than its children's"
                )
            depths.append(depths[parent] + 1)
        if depths != sorted(depths):
            raise UserError(
                f"a tree with depths {depths} is not in order; number its nodes level by level"
            )

    @property
    def size(self) -> int:
        """N, the number of drafted nodes."""
        return len(self.parents)

    @functools.cached_property
    def parent(self) -> Int[np.ndarray, " nodes"]:
        """The parent of each node; the root is its own."""
        return np.array((0, *self.parents))

    @functools.cached_property
    def depth(self) -> Int[np.ndarray, " nodes"]:
        """The depth of each node, int32; 0 for the root."""
        depth = np.zeros(self.size + 1, np.int32)
        for node in range(1, self.size + 1):
            depth[node] = depth[self.parent[node]] + 1
        return depth

    @property
    def height(self) -> int:
        """The longest path, in drafted nodes."""
        return int(self.depth[-1])

    @functools.cached_property
    def ancestors(self) -> Bool[np.ndarray, "nodes nodes"]:
        """Which nodes each one descends from; entry (i, j) says that j is i or an ancestor of i."""
        ancestors = np.eye(self.size + 1, dtype=bool)
        for node in range(1, self.size + 1):
            ancestors[node] |= ancestors[self.parent[node]]
        return ancestors

    @functools.cached_property
    def levels(self) -> tuple[Int[np.ndarray, " _"], ...]:
        """The nodes of each depth 0..height."""
        return tuple(np.flatnonzero(self.depth == depth) for depth in range(self.height + 1))

    @functools.cached_property
    def sibling_rank(self) -> Int[np.ndarray, " nodes"]:
        """Which child of its parent each node is."""
        ranks, children = [0], [0] * (self.size + 1)
        for parent in self.parents:
            ranks.append(children[parent])
            children[parent] += 1
        return np.array(ranks)

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the child indices that lead from the root to a node."""
        return tuple(
            int(self.sibling_rank[above]) for above in np.flatnonzero(self.ancestors[node])[1:]
        )

    @functools.cached_property
    def paths(self) -> Int[np.ndarray, "nodes height"]:
        """The nodes on the way to each node, int32, without the root and padded with 0."""
        paths = np.zeros((self.size + 1, self.height), np.int32)
        for node in range(1, self.size + 1):
            paths[node] = paths[self.parent[node]]
            paths[node, self.depth[node] - 1] = node
        return paths

    @functools.cached_property
    def inner(self) -> Int[np.ndarray, " inner"]:
        """The nodes that have children, the root first: the draft model runs on these."""
        return np.unique(self.parent[1:])

    @functools.cached_property
    def inner_rank(self) -> Int[np.ndarray, " nodes"]:
        """The index of each node among the inner ones; that of a leaf, which has none, is not to be used."""
        return np.minimum(
            np.searchsorted(self.inner, np.arange(self.size + 1)), max(len(self.inner) - 1, 0)
        )

    @functools.cached_property
    def children_table(self) -> Int[np.ndarray, "nodes children"]:
        """The children of each node, int32, in the order in which they are drawn, padded with -1."""
        table = np.full((self.size + 1, int(self.sibling_rank.max()) + 1), -1, np.int32)
        nodes = np.arange(1, self.size + 1)
        table[self.parent[1:], self.sibling_rank[1:]] = nodes
        return table

    @functools.cached_property
    def level_table(self) -> Int[np.ndarray, "_ width"]:
        """The nodes of each level, int32, padded with -1; the row after the last level is empty."""
        table = np.full((self.height + 2, max(map(len, self.levels))), -1, np.int32)
        for depth, nodes in enumerate(self.levels):
            table[depth, : len(nodes)] = nodes
        return table


def none() -> Tree:
    """Returns the tree without drafts: one token per call, from the target alone."""
    return Tree(())


def chain(length: int) -> Tree:
    """Returns one draft of `length` tokens (speculative decoding; "sequence" in ERSD)."""
    return iid_chains(1, length)


def _check_size(nodes: int) -> None:
    """Raises `UserError` for too large a tree; before its nodes are listed, which may not fit the memory."""
    if nodes > MOST_NODES:
        raise UserError(f"a tree of {nodes:,} nodes is too large; give at most {MOST_NODES:,}")


def iid_chains(drafts: int, length: int) -> Tree:
    """Returns `drafts` chains of `length` tokens that branch at the root (SpecTr, eq. 7)."""
    checked(num_drafts=drafts, draft_length=length)
    _check_size(drafts * length)
    return prefix_tree(drafts, *[1] * (length - 1))


def prefix_tree(*branching: int) -> Tree:
    """Returns the tree whose nodes at depth i have `branching[i]` children (SpecTr, Algorithm 5: k_1, ..., k_L)."""
    parents: list[int] = []
    level = range(1)
    for depth, children in enumerate(branching, start=1):
        checked(**{f"k_{depth}": children})
        _check_size(len(parents) + len(level) * children)
        parents += [node for node in level for _ in range(children)]
        level = range(level.stop, level.stop + len(level) * children)
    return Tree(tuple(parents))


def batch(drafts: int) -> Tree:
    """Returns `drafts` alternatives for one token (ERSD, Figure 1d)."""
    return prefix_tree(drafts)


def specinfer(size: int) -> Tree:
    """Returns SpecInfer's tree in ERSD's section 5: two tokens in common, then three chains of the remaining nodes."""
    checked(size=size)
    _check_size(size)
    trunk = min(size, 2)
    return Tree(
        tuple(range(trunk)) + tuple(max(node - 3, trunk) for node in range(trunk + 1, size + 1))
    )


SHAPES: dict[str, Callable[[int], Tree]] = {"chain": chain, "batch": batch, "specinfer": specinfer}


def parse(spec: "Tree | str") -> Tree:
    """Returns the tree that a string names: `4,2,1` (a prefix tree), `8x4` (K x L, K chains of L), `chain:8`, `batch:8`,
    `specinfer:16`; a `Tree` is returned as it is.

    Raises:
      UserError: the string names no tree.
    """
    if isinstance(spec, Tree):
        return spec
    make = _maker(str(spec))
    if make is None:
        known = ", ".join(f"{name}:8" for name in SHAPES)
        raise UserError(
            f"tree {spec!r} is not known; give the children of each level, such as 4,2,1, or one of 8x4, {known}"
        )
    try:
        return make()
    except UserError as error:  # It names a number alone.
        raise UserError(f"tree {spec!r}: {error}") from None


def _maker(spec: str) -> Callable[[], Tree] | None:
    """Returns the function that makes the tree which `spec` names, or None if it names none."""
    chains, _, length = spec.partition("x")
    if chains.isdecimal() and length.isdecimal():
        return functools.partial(iid_chains, int(chains), int(length))
    name, _, number = spec.rpartition(":")
    numbers = [int(part) for part in number.split(",") if part.strip().isdecimal()]
    if len(numbers) == number.count(",") + 1:
        if not name:
            return functools.partial(prefix_tree, *numbers)
        if name in SHAPES and len(numbers) == 1:
            return functools.partial(SHAPES[name], *numbers)
    return None


def spelled(branching: tuple[int, ...]) -> str:
    """Returns the name that `parse` knows for the prefix tree with so many children in each level: `4,2,1`."""
    return ",".join(map(str, branching))


def checked(**values: int) -> None:
    """Raises `UserError` for a number that is not whole or less than 1."""
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}={value!r} is not a whole number of at least 1; give one")
