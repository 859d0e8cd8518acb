"""Draft trees: static shapes, known at compile time.

Node 0 is the root, the last committed token. Drafted nodes are numbered 1..N level by level, so
that a parent's number is less than its child's.
"""

import dataclasses
import functools
import heapq
import numbers
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Int, Key

from spectr_jax.utils.errors import UserError

Keys: TypeAlias = Key[Array, " batch"]
PerRow: TypeAlias = Int[Array, " batch"]
Tokens: TypeAlias = Int[Array, "batch time"]  # Of the sequences.
NodeTokens: TypeAlias = Int[Array, "batch nodes"]  # Of the trees, the root's first.
Paths: TypeAlias = Int[Array, "batch height"]  # The accepted nodes in order, without the root.

MOST_NODES = 10_000
"""The most nodes of a tree: the ancestor mask is a square matrix. Useful trees have dozens."""


RECALL = (0.5, 0.13, 0.07, 0.05, 0.035, 0.025, 0.02, 0.015)
"""The rates at which the first, second, ... candidate of `drafters.Recall` is accepted, rounded."""


@dataclasses.dataclass(frozen=True)
class Tree:
    """A draft tree.

    Attributes:
      parents: the parent of each drafted node 1..N, in order of depth.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not all(isinstance(parent, numbers.Integral) for parent in self.parents):
            wanted = "must be integers, one for each node 1..N"
            raise UserError(f"parents={self.parents!r:.60}: {wanted}")
        object.__setattr__(self, "parents", tuple(map(int, self.parents)))  # Trees are hashed.
        _check_size(len(self.parents))
        ordered = all(0 <= parent < node for node, parent in enumerate(self.parents, start=1))
        if not ordered or np.any(np.diff(self.depth) < 0):
            wanted = "must number the nodes level by level, parents first"
            raise UserError(f"parents={self.parents!r:.60}: {wanted}")

    @property
    def size(self) -> int:
        """Returns N, the number of drafted nodes."""
        return len(self.parents)

    @functools.cached_property
    def parent(self) -> Int[np.ndarray, " nodes"]:
        """Returns the parent of each node; the root is its own parent."""
        return np.array((0, *self.parents))

    @functools.cached_property
    def depth(self) -> Int[np.ndarray, " nodes"]:
        """Returns the depth of each node, int32; 0 for the root."""
        depth = np.zeros(self.size + 1, np.int32)
        for node, parent in enumerate(self.parents, start=1):
            depth[node] = depth[parent] + 1
        return depth

    @property
    def height(self) -> int:
        """Returns the number of drafted nodes on the longest path."""
        return int(self.depth[-1])

    @functools.cached_property
    def ancestors(self) -> Bool[np.ndarray, "nodes nodes"]:
        """Returns the ancestor mask: entry (i, j) is True if j is i or an ancestor of i."""
        ancestors = np.eye(self.size + 1, dtype=bool)
        for node, parent in enumerate(self.parents, start=1):
            ancestors[node] |= ancestors[parent]
        return ancestors

    @functools.cached_property
    def levels(self) -> tuple[Int[np.ndarray, " _"], ...]:
        """Returns the nodes of each depth 0..height."""
        return tuple(np.flatnonzero(self.depth == depth) for depth in range(self.height + 1))

    @functools.cached_property
    def sibling_rank(self) -> Int[np.ndarray, " nodes"]:
        """Returns the index of each node among the children of its parent."""
        ranks, children = [0], [0] * (self.size + 1)
        for parent in self.parents:
            ranks.append(children[parent])
            children[parent] += 1
        return np.array(ranks)

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the child indices on the path from the root to `node`."""
        return tuple(self.sibling_rank[np.flatnonzero(self.ancestors[node])[1:]].tolist())

    @functools.cached_property
    def paths(self) -> Int[np.ndarray, "nodes height"]:
        """Returns the path to each node, int32, without the root and padded with 0."""
        paths = np.zeros((self.size + 1, self.height), np.int32)
        for node, parent in enumerate(self.parents, start=1):
            paths[node] = paths[parent]
            paths[node, self.depth[node] - 1] = node
        return paths

    @functools.cached_property
    def inner(self) -> Int[np.ndarray, " inner"]:
        """Returns the nodes that have children, root first; the draft model runs on these."""
        return np.unique(self.parent[1:])

    @functools.cached_property
    def is_inner(self) -> Bool[np.ndarray, " nodes"]:
        """Returns whether each node has children."""
        return np.isin(np.arange(self.size + 1), self.inner)

    @functools.cached_property
    def inner_rank(self) -> Int[np.ndarray, " nodes"]:
        """Returns the index of each node in `inner`; undefined for leaves, but within bounds."""
        ranks = np.searchsorted(self.inner, np.arange(self.size + 1))
        return np.minimum(ranks, max(len(self.inner) - 1, 0))

    @functools.cached_property
    def children_table(self) -> Int[np.ndarray, "nodes children"]:
        """Returns the children of each node, int32, in drawing order, padded with -1."""
        table = np.full((self.size + 1, int(self.sibling_rank.max()) + 1), -1, np.int32)
        table[self.parent[1:], self.sibling_rank[1:]] = np.arange(1, self.size + 1)
        return table

    @functools.cached_property
    def level_table(self) -> Int[np.ndarray, "_ width"]:
        """Returns the nodes of each level, int32, padded with -1; the last row is all padding."""
        table = np.full((self.height + 2, max(map(len, self.levels))), -1, np.int32)
        for depth, nodes in enumerate(self.levels):
            table[depth, : len(nodes)] = nodes
        return table


def _check_size(nodes: int) -> None:
    """Raises `UserError` if the tree is too large, before a list of its nodes exhausts memory."""
    if nodes > MOST_NODES:
        raise UserError(f"a tree of {nodes:,} nodes is too large; give at most {MOST_NODES:,}")


def none() -> Tree:
    """Returns the tree without drafts: each call emits one token, drawn from the target."""
    return Tree(())


def chain(length: int) -> Tree:
    """Returns one chain of `length` tokens (speculative decoding; "sequence" in ERSD)."""
    return iid_chains(1, length)


def iid_chains(drafts: int, length: int) -> Tree:
    """Returns `drafts` chains of `length` tokens from the root (SpecTr, eq. 7)."""
    check_positive(num_drafts=drafts, draft_length=length)
    _check_size(drafts * length)
    return prefix_tree(drafts, *[1] * (length - 1))


def prefix_tree(*branching: int) -> Tree:
    """Returns the tree whose nodes at depth i have `branching[i]` children.

    These are k_1, ..., k_L in SpecTr's Algorithm 5.
    """
    parents: list[int] = []
    level = range(1)
    for depth, children in enumerate(branching, start=1):
        check_positive(**{f"k_{depth}": children})
        _check_size(len(parents) + len(level) * children)
        parents += [node for node in level for _ in range(children)]
        level = range(level.stop, level.stop + len(level) * children)
    return Tree(tuple(parents))


def batch(drafts: int) -> Tree:
    """Returns `drafts` candidates for one token (ERSD, Figure 1d)."""
    return prefix_tree(drafts)


def specinfer(size: int) -> Tree:
    """Returns SpecInfer's tree of ERSD, section 5: two shared tokens, then three chains."""
    check_positive(size=size)
    _check_size(size)
    trunk = min(size, 2)
    return Tree((*range(trunk), *(max(node - 3, trunk) for node in range(trunk + 1, size + 1))))


def recall(size: int) -> Tree:
    """Returns the tree of `size` nodes for drafts that are ranked, by their fitted acceptance."""
    check_positive(size=size)
    _check_size(size)
    return optimal_tree(RECALL, size)


SHAPES: dict[str, Callable[[int], Tree]] = {
    "chain": chain,
    "batch": batch,
    "specinfer": specinfer,
    "recall": recall,
}


def parse(spec: "Tree | str") -> Tree:
    """Returns the tree that `spec` names; a `Tree` is returned as it is.

    The names are `4,2,1` (a prefix tree), `8x4` (K x L: K chains of L tokens), `chain:8`,
    `batch:8`, `specinfer:16` and `recall:8`.

    Raises:
      UserError: `spec` names no tree.
    """
    if isinstance(spec, Tree):
        return spec
    spec = str(spec)
    name, _, number = spec.rpartition(":")
    try:
        if re.fullmatch(r"\d+x\d+", spec):
            return iid_chains(*map(int, spec.split("x")))
        if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", spec):
            return prefix_tree(*map(int, spec.split(",")))
        if name in SHAPES and re.fullmatch(r"\s*\d+\s*", number):
            return SHAPES[name](int(number))
    except UserError as error:
        raise UserError(f"tree={spec!r}: {error}") from None
    hint = f"the children of each level, such as 4,2,1, or 8x4, {':8, '.join(SHAPES)}:8"
    raise UserError(f"tree={spec!r}: is unknown; give {hint}")


def spelled(branching: tuple[int, ...]) -> str:
    """Returns the name of a prefix tree, as `parse` reads it: `4,2,1` for (4, 2, 1)."""
    return ",".join(map(str, branching))


def optimal_tree(R: Sequence[float], size: int) -> Tree:
    """Returns the tree of `size` nodes that maximises `expected_tokens`.

    Source: ERSD, Algorithm 3.

    Raises:
      UserError: R is empty or does not descend.
    """
    return tree_of(optimal_order(R, size))


def optimal_order(R: Sequence[float], size: int) -> list[tuple[int, ...]]:
    """Returns the nodes of `optimal_tree`, likeliest first, as child indices from the root.

    The first n nodes are the optimal tree of n nodes. The search is ERSD's Algorithm 3, with a
    priority queue: O(N log N).

    Raises:
      UserError: R is empty or does not descend.
    """
    check_positive(size=size)
    if len(R) < 1 or not all(1 >= a >= b >= 0 for a, b in zip(R, [*R[1:], 0], strict=True)):
        raise UserError(
            f"R={list(R)}: must descend within [0, 1]; give the acceptance by child index, "
            "through `descending` if it is noisy"
        )
    order: list[tuple[int, ...]] = []
    queue: list[tuple[float, tuple[int, ...]]] = [(-R[0], (0,))]
    while len(order) < size:
        _, node = heapq.heappop(queue)
        order.append(node)
        siblings = [(*node[:-1], node[-1] + 1)] if node[-1] + 1 < len(R) else []
        for relative in [*siblings, (*node, 0)]:
            heapq.heappush(queue, (-float(np.prod([R[index] for index in relative])), relative))
    return order


def tree_of(paths: Sequence[tuple[int, ...]]) -> Tree:
    """Returns the tree whose nodes have these paths of child indices from the root."""
    ordered = sorted(paths, key=lambda path: (len(path), path))
    number = {(): 0} | {path: node for node, path in enumerate(ordered, start=1)}
    return Tree(tuple(number[path[:-1]] for path in ordered))


def check_positive(**values: int) -> None:
    """Raises `UserError` unless each of the values is a positive integer."""
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            raise UserError(f"{name}={value!r}: must be a positive integer")
