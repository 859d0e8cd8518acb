r"""Phase 3 of a call (select): greedy multi-path block verification, GBV.

Source: Thomas and Pal, 2026, arXiv 2602.16961. Block verification (`decoding/verifiers/block.py`)
is applied to one of K i.i.d. chains. Tokens at each node are ranked by q / p, and the chain is the
lexicographically largest: among the chains that share its prefix, its next token has the highest
ratio. Let u be the draft probability of the path so far, and a that of all paths of its length that
rank below it. Let P be the prefix sums of p in the order of the ratios. The next token c of the
chosen chain has the distribution

$$g_c = \frac{(a + u P_c)^K - (a + u P_{c-1})^K}{(a + u)^K - a^K}.$$

Unlike in `gbv_conditional`, it is not conditioned on the number of chains that share the path.

The code carries $\beta = a / (a + u)$ down the path. With $y_c = \beta + (1 - \beta) P_c$ and j
from 0 to K - 1,

$$g_c = p_c \ \frac{\sum_j y_c^j \ y_{c-1}^{K-1-j}}{\sum_j \beta^j}, \qquad
\beta' = \frac{y_{c-1}}{y_c}.$$

These are sums of positive numbers, which stay accurate however improbable the path is.
"""

import dataclasses
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers.base import Selection, Verifier
from spectr_jax.decoding.verifiers.block import along_winners
from spectr_jax.transport import rules
from spectr_jax.transport.otm import cumulative
from spectr_jax.transport.types import DraftTokens, FloatScalar, IntScalar, Probs, Valid
from spectr_jax.transport.winner import Winner
from spectr_jax.utils.errors import UserError

AnyFloat: TypeAlias = Float[Array, "*vocab"]


@dataclasses.dataclass(frozen=True)
class MultiPath(Verifier):
    """Verifies one of K i.i.d. chains as a whole: the one whose tokens have the highest q / p."""

    rule = rules.IID

    def check(self, tree: Tree) -> None:
        """Raises `UserError` unless the tree is K chains of one length."""
        if tree.size and tree != trees.iid_chains(len(tree.levels[1]), tree.height):
            wanted = "must be K chains of one length; give num_drafts"
            raise UserError(f"parents={tree.parents!r:.60}: {wanted}")

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        chains = len(scored.tree.levels[1]) if scored.tree.size else 1

        def prepare(
            key: PRNGKeyArray, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid
        ) -> tuple[Ranked, IntScalar, IntScalar]:
            del key  # Tokens of equal ratio are ranked by index.
            ranked = ranked_by_ratio(p, q)
            index = jnp.argmax(jnp.where(valid, ranked.rank[drafts], -1))
            return ranked, index, drafts[index]

        def win(
            beta: FloatScalar, prepared: tuple[Ranked, IntScalar, IntScalar]
        ) -> tuple[Winner, FloatScalar]:
            ranked, index, token = prepared
            g, below, upto = chosen_pmf(ranked, beta, chains)
            return Winner(index, g), below[token] / jnp.where(upto[token] > 0, upto[token], 1)

        return along_winners(key, scored, prepare, win, jnp.zeros((), scored.logits.dtype))


class Ranked(NamedTuple):
    """The order of tokens by q / p, ties by index. All fields are [V], by token."""

    rank: Int[Array, " vocab"]
    p: Probs
    below: Probs  # The mass of p that ranks below the token.
    upto: Probs  # The same, including the token.


def ranked_by_ratio(p: Probs, q: Probs) -> Ranked:
    """Returns the order of tokens by q / p, for p [V] and q [V]; tokens with p = 0 come last."""
    order = jnp.argsort(jnp.where(p > 0, q / jnp.where(p > 0, p, 1), jnp.inf))
    rank = jnp.zeros(len(p), jnp.int32).at[order].set(jnp.arange(len(p), dtype=jnp.int32))
    upto = jnp.minimum(cumulative(jnp, p[order]), 1)
    return Ranked(rank=rank, p=p, below=jnp.pad(upto[:-1], (1, 0))[rank], upto=upto[rank])


def chosen_pmf(ranked: Ranked, beta: FloatScalar, chains: int) -> tuple[Probs, Probs, Probs]:
    """Returns g, the distribution of the chosen chain's token, and y below and up to each token.

    All are [V].

    Args:
      ranked: the order of tokens at the node.
      beta: [] draft probability of the paths that rank below the node, divided by that of these
        paths and the node's own.
      chains: K, static.
    """
    below, upto = (beta + (1 - beta) * mass for mass in (ranked.below, ranked.upto))
    scaled = ranked.p * _mixed_powers(upto, below, chains)
    return scaled / _mixed_powers(jnp.ones_like(beta), beta, chains), below, upto


def _mixed_powers(x: AnyFloat, y: AnyFloat, k: int) -> AnyFloat:
    """Returns the sum of x^j y^(k-1-j) over j = 0..k-1, which is (x^k - y^k) / (x - y)."""
    total, power = jnp.ones_like(x), y
    for _ in range(1, k):
        total, power = total * x + power, power * y
    return total
