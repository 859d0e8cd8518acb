"""Finds the tree that emits the most tokens per call for a measured acceptance.

For drafts without replacement (GSD, ERSD), R [C] is the acceptance by child index: the probability
that the token after a node is its first, second, ... child, assumed equal at all nodes (0-th
order). I.i.d. drafts are exchangeable, and several may carry the accepted token. For them,
`carriers` [K + 1, K + 1] replaces R: entry (k, m) is the probability that m of k drafts carry the
accepted token.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from spectr_jax.decoding import Method
from spectr_jax.decoding.tree import Tree, check_positive, prefix_tree
from spectr_jax.decoding.verifiers import Block, TokenByToken
from spectr_jax.transport import rules
from spectr_jax.utils.errors import UserError

CARRIERS, CHILDREN = "carriers", "children"


def statistic(method: Method) -> str | None:
    """Returns the name of the statistic of a method's plan that chooses its trees, or None.

    For i.i.d. drafts it is `CARRIERS`, how many of k drafts carry the token, and for drafts without
    replacement `CHILDREN`, the acceptance by child index. It is None without a draft model, and for
    verifiers without a plan.
    """
    verifier = method.verifier
    if not method.needs_draft or not isinstance(verifier, TokenByToken | Block):
        return None
    if verifier.rule == rules.IID:
        return CARRIERS
    return CHILDREN if verifier.rule in (rules.WITHOUT_REPLACEMENT, rules.RACE) else None


def expected_tokens(tree: Tree, R: Sequence[float]) -> float:
    """Returns the expected tokens per call: 1 + each node's acceptance (ERSD, section 4).

    Raises:
      UserError: R has fewer entries than some node has children.
    """
    most = tree.children_table.shape[1]
    if most > len(R):
        raise UserError(
            f"R={list(R)}: has {len(R)} entries, but a node has {most} children; give a longer R"
        )
    accepted = [1.0]
    for node in range(1, tree.size + 1):
        accepted.append(accepted[tree.parent[node]] * R[tree.sibling_rank[node]])
    return float(sum(accepted))


def descending(R: Sequence[float]) -> list[float]:
    """Returns the descending sequence closest to R: isotonic regression, by pooling neighbours."""
    pools: list[list[float]] = []
    for value in R:
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, n), (b, m) = pools[-2:]
            pools[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    return [value for value, number in pools for _ in range(int(number))]


def expected_tokens_iid(branching: Sequence[int], carriers: np.ndarray) -> float:
    """Returns the expected tokens per call of token-by-token verification with i.i.d. drafts.

    The tree is the prefix tree (k_1, ..., k_L). The number of live nodes is a Markov chain.

    Raises:
      UserError: a level may have more live nodes than `carriers` covers.
    """
    check_width(branching, len(carriers) - 1)
    widths = np.cumprod([1, *branching])
    below = np.zeros(widths[-1] + 1)  # The accepted tokens below 0, 1, ... live nodes.
    for children, width in zip(reversed(branching), widths[-2::-1], strict=True):
        live_children = carriers[children * np.arange(width + 1), 1 : len(below)]
        below = live_children @ (1 + below[1:])
    return float(1 + below[1])


def best_prefix_tree(carriers: np.ndarray, size: int, height: int) -> tuple[int, ...]:
    """Returns the prefix tree (k_1, ..., k_L) that emits the most tokens per call, by exhaustive
    search. Of equally good trees it is the smallest.

    Args:
      carriers: [K + 1, K + 1] with K >= `size`.
      size: the largest number of nodes N.
      height: the largest number of levels L.

    Raises:
      UserError: `carriers` covers fewer drafts than `size`.
    """
    check_positive(size=size, height=height)

    def score(branching: tuple[int, ...]) -> tuple[float, int]:
        return expected_tokens_iid(branching, carriers), -int(np.cumprod(branching).sum())

    return max(prefix_shapes(size, height, size), key=score)


def prefix_shapes(width: int, height: int, size: int) -> Iterator[tuple[int, ...]]:
    """Yields all (k_1, ..., k_L) of at most `width` leaves, `height` levels and `size` nodes."""
    if not height:
        return
    for first in range(1, min(width, size) + 1):
        yield (first,)
        for rest in prefix_shapes(width // first, height - 1, size // first - 1):
            yield (first, *rest)


def branching_of(tree: Tree) -> tuple[int, ...]:
    """Returns (k_1, ..., k_L) of a prefix tree; raises `UserError` for any other tree."""
    sizes = [len(level) for level in tree.levels]
    branching = tuple(below // above for above, below in itertools.pairwise(sizes))
    if 0 in branching or prefix_tree(*branching) != tree:
        raise UserError(
            f"parents={tree.parents!r:.60}: must be a prefix tree; "
            "give all nodes of a level equally many children"
        )
    return branching


def check_width(branching: Sequence[int], measured: int) -> None:
    """Raises `UserError` if a level of a prefix tree may have more than `measured` live drafts."""
    width = int(np.prod(branching))
    if width > measured:
        raise UserError(
            f"tree={tuple(branching)}: may have {width} live drafts, but only {measured} were "
            "measured; give a smaller tree"
        )
