"""Tokens a call of a method, predicted from what the drafts of a node were seen to do; nodes are taken to be alike.

What counts is told by what the method is (`statistic`). Token by token it is `planning.tree_search` that predicts. For block
verification P(tau >= i | path) is the running probability run_i (Sun et al., 2024), so a call emits one token
more than the sum of E[run_i] over the depths. Under 0-th order acceptance, where nodes are alike, run is a Markov chain
together with the number of live drafts: run_(i+1) = min(1, run_i * q(w) / g(w)) for the winner w among k drafts, which is
distributed as g.

Shape suffixes: K drafts, R ratios.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.tree import Tree
from spectr_jax.experiments.planning import tree_search
from spectr_jax.utils.errors import UserError

STEP = 0.125
"""The step of log2 ratios in a table of winners, and of log2 run, so that run stays on the grid."""
OCTAVES = 8
"""Ratios from 2^-8 to 2^8; smaller ones count as 0, larger ones as 2^8."""
RATIOS = int(2 * OCTAVES / STEP) + 2
"""Cells of a table of winners: ratio 0, then 2^-8, 2^-7.875, ..., 2^8."""


CARRIERS, WINNERS, CHILDREN = "carriers", "winners", "children"


def statistic(method: Method) -> str | None:
    """Returns what has to be observed of a method's drafts to predict it, or None where nothing would do.

    It is the verifier's `statistic`. For i.i.d. drafts this is `CARRIERS`, how many of k carry the token, or, for block
    verification, `WINNERS`, the ratio of the winner too. For distinct drafts, drawn one after the other, it is `CHILDREN`,
    the acceptance by child index. Methods without a draft model have none;
    `measure.replay` compares the others.
    """
    if not method.needs_draft:
        return None
    return method.verifier.statistic


def predictor(method: Method, table: np.ndarray) -> Callable[[Tree], float]:
    """Returns tokens a call of the method on a tree, by what was observed of it.

    Args:
      method: with a `statistic`.
      table: carriers [K + 1, K + 1] or R [C], as in `planning.tree_search`, or winners as in `block_predictor`.

    Returns:
      A function that raises `UserError` for a tree that is larger than what was observed; for i.i.d. drafts for one that is
      no prefix tree, too.
    """
    if statistic(method) == CHILDREN:
        return lambda tree: tree_search.expected_tokens(tree, table.tolist())
    if statistic(method) == WINNERS:
        tokens = block_predictor(table)
        return lambda tree: tokens(tree_search.branching_of(tree))
    return lambda tree: tree_search.expected_tokens_iid(tree_search.branching_of(tree), table)


def ratio_cell(ratio: jax.Array) -> jax.Array:
    """Returns the cell of a ratio in a table of winners."""
    return jnp.clip(jnp.round((jnp.log2(ratio) + OCTAVES) / STEP) + 1, 0, RATIOS - 1).astype(
        jnp.int32
    )


def block_predictor(winners: np.ndarray) -> Callable[[Sequence[int]], float]:
    """Predicts tokens per call of block verification.

    Args:
      winners: [K + 1, R, K + 1], for k drafts the probability that the winner's ratio q / g is in a cell and that j of
        them are its token.

    Returns:
      A function of (k_1, ..., k_L) that returns the tokens per call on that prefix tree of i.i.d. drafts. It raises
      `UserError` if some
      level may have more live nodes than `winners` covers.
    """
    most = len(winners) - 1
    # log2 run = -STEP * index; the last index is 0 itself.
    ends = int(4 * OCTAVES / STEP)
    values = np.append(2.0 ** (-STEP * np.arange(ends)), 0.0)
    shifts = np.arange(RATIOS - 1) - int(OCTAVES / STEP)
    moved = np.clip(
        np.arange(ends)[:, None] - shifts, 0, ends
    )  # [run, ratio] -> run; ratio 0 apart.

    @functools.cache
    def below(branching: tuple[int, ...]) -> np.ndarray:
        """Returns [live, run] sum of E[run] over the levels of `branching`, which hang below so many live nodes."""
        result = np.zeros((most + 1, ends + 1))
        if not branching:
            return result
        children, *rest = branching
        gain = values[moved][:, :, None] + np.moveaxis(
            below(tuple(rest))[:, moved], 0, -1
        )  # [run, ratio, live after]
        for live in range(1, most // children + 1):
            result[live, :ends] = np.tensordot(gain, winners[live * children][1:], 2)
        return result

    def tokens(branching: Sequence[int]) -> float:
        width = int(np.prod(branching))
        if width > most:
            raise UserError(
                f"tree {tuple(branching)} may have {width} live drafts, measured are {most}; give a smaller tree"
            )
        return float(1 + below(tuple(branching))[1, 0])

    return tokens
