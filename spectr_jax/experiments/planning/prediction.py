"""Predicts a method's tokens per call from a statistic of the drafts at a node.

All nodes are assumed to be alike (0-th order acceptance). `statistic` names what must be measured
for a method. For token-by-token verification, `planning.tree_search` predicts. For block
verification, P(tau >= i | path) is the running probability run_i (Sun et al., 2024), so a call
emits 1 + the sum of E[run_i] over the depths. With alike nodes, run and the number of live drafts
form a Markov chain: run_(i+1) = min(1, run_i * q(w) / g(w)) for the winner w among k drafts, which
has distribution g.

Shape names: K drafts, R ratios.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers import Block, TokenByToken
from spectr_jax.experiments.planning import tree_search
from spectr_jax.transport import rules

STEP = 0.125
"""The step of log2 ratios in a table of winners, and of log2 run, so that run stays on the grid."""
OCTAVES = 8
"""Ratios range from 2^-8 to 2^8; smaller ones count as 0, larger ones as 2^8."""
RATIOS = int(2 * OCTAVES / STEP) + 2
"""The number of ratios in a table of winners: 0, then 2^-8, 2^-7.875, ..., 2^8."""


CARRIERS, WINNERS, CHILDREN = "carriers", "winners", "children"


def statistic(method: Method) -> str | None:
    """Returns the name of the statistic that predicts a method's tokens per call, or None.

    For i.i.d. drafts it is `CARRIERS`, how many of k drafts carry the token, or, for block
    verification, `WINNERS`, which includes the winner's ratio. For drafts without replacement it is
    `CHILDREN`, the acceptance by child index. It is None without a draft model, and for verifiers
    that none of these predicts; `measure.replay` compares the latter.
    """
    verifier = method.verifier
    if not method.needs_draft:
        return None
    if isinstance(verifier, Block):
        return WINNERS
    if not isinstance(verifier, TokenByToken):
        return None
    if verifier.rule == rules.IID:
        return CARRIERS
    return CHILDREN if verifier.rule in (rules.WITHOUT_REPLACEMENT, rules.RACE) else None


def predictor(method: Method, table: np.ndarray) -> Callable[[Tree], float]:
    """Returns a function that predicts the method's tokens per call on a tree.

    Args:
      method: a method with a `statistic`.
      table: the observed statistic: carriers [K + 1, K + 1] or R [C] as in `planning.tree_search`,
        or winners as in `block_predictor`.

    Returns:
      A function that raises `UserError` for a tree with more drafts than were observed and, for
      i.i.d. drafts, for a tree that is not a prefix tree.
    """
    if statistic(method) == CHILDREN:
        return lambda tree: tree_search.expected_tokens(tree, table.tolist())
    if statistic(method) == WINNERS:
        tokens = block_predictor(table)
        return lambda tree: tokens(tree_search.branching_of(tree))
    return lambda tree: tree_search.expected_tokens_iid(tree_search.branching_of(tree), table)


def ratio_cell(ratio: jax.Array) -> jax.Array:
    """Returns the index of a ratio in a table of winners."""
    index = jnp.round((jnp.log2(ratio) + OCTAVES) / STEP) + 1
    return jnp.clip(index, 0, RATIOS - 1).astype(jnp.int32)


def block_predictor(winners: np.ndarray) -> Callable[[Sequence[int]], float]:
    """Returns a function that predicts the tokens per call of block verification.

    Args:
      winners: [K + 1, R, K + 1], for k drafts the probability that the winner's ratio q / g has
        index r and that j drafts carry the winner's token.

    Returns:
      A function of a prefix tree (k_1, ..., k_L) of i.i.d. drafts. It raises `UserError` if a
      level may have more live nodes than `winners` covers.
    """
    most = len(winners) - 1
    # log2 run = -STEP * index, except that the last index stands for run = 0.
    ends = int(4 * OCTAVES / STEP)
    values = np.append(2.0 ** (-STEP * np.arange(ends)), 0.0)
    # The index of run after each positive ratio: [run, ratio].
    shifts = np.arange(RATIOS - 1) - int(OCTAVES / STEP)
    moved = np.clip(np.arange(ends)[:, None] - shifts, 0, ends)

    @functools.cache
    def below(branching: tuple[int, ...]) -> np.ndarray:
        """Returns [live, run]: the sum of E[run] over these levels, below `live` live nodes."""
        result = np.zeros((most + 1, ends + 1))
        if not branching:
            return result
        children, *rest = branching
        further = np.moveaxis(below(tuple(rest))[:, moved], 0, -1)
        gain = values[moved][:, :, None] + further  # [run, ratio, live children]
        for live in range(1, most // children + 1):
            result[live, :ends] = np.tensordot(gain, winners[live * children][1:], 2)
        return result

    def tokens(branching: Sequence[int]) -> float:
        tree_search.check_width(branching, most)
        return float(1 + below(tuple(branching))[1, 0])

    return tokens
