r"""Phase 3 of a call (select): greedy multi-path block verification, GBV (Thomas and Pal, 2026, arXiv 2602.16961).

Of K i.i.d. chains one is chosen, and block verification (`decoding/verifiers/block.py`) decides how much of it to keep. The
chosen one is the largest in the order of dictionaries, where at each node tokens are ranked by q / p: among the chains
that agree with it so far, its next token has the highest ratio. Let u be the draft probability of the path so far and a
that of all paths of its length that rank below it. With P the prefix sums of p in the order of the ratios, the next token
c of the chosen chain has the distribution

$$g_c = \frac{(a + u P_c)^K - (a + u P_{c-1})^K}{(a + u)^K - a^K}.$$

It is not given how many chains agree with the path so far, as that of `gbv_conditional` is.

Here $\beta = a / (a + u)$ is carried down, and with $y_c = \beta + (1 - \beta) P_c$

$$g_c = p_c \ \frac{\sum_j y_c^j \ y_{c-1}^{K-1-j}}{\sum_j \beta^j}, \qquad \beta' = \frac{y_{c-1}}{y_c},$$

with j from 0 to K - 1: sums of positive numbers, which lose nothing however improbable the path is.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers.base import Selection, Verifier
from spectr_jax.decoding.verifiers.block import along_winners
from spectr_jax.transport.otm import cumulative
from spectr_jax.transport.types import FloatScalar, IntScalar, Probs
from spectr_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class MultiPath(Verifier):
    """Verifies one of K i.i.d. chains, the first in an order of ratios, as a whole."""

    rule = "iid"

    def check(self, tree: Tree) -> None:
        """Raises `UserError` unless the tree is K chains of one length."""
        if tree.size and tree != trees.iid_chains(len(tree.levels[1]), tree.height):
            raise UserError(
                "it chooses one of K chains, and its tree is not K chains; give num_drafts"
            )

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        """See `Verifier`. Consumes `key`."""
        chains = len(scored.tree.levels[1]) if scored.tree.size else 1

        def win_at(
            key: PRNGKeyArray,
            p: Probs,
            q: Probs,
            drafts: Int[Array, " k"],
            valid: Bool[Array, " k"],
        ) -> tuple[Ranked, IntScalar, IntScalar]:
            del key  # Tokens of equal ratio are ranked by their numbers.
            ranked = ranked_by_ratio(p, q)
            draft = jnp.argmax(jnp.where(valid, ranked.rank[drafts], -1))
            return ranked, draft, drafts[draft]

        def follow(
            beta: FloatScalar, prepared: tuple[Ranked, IntScalar, IntScalar]
        ) -> tuple[IntScalar, Probs, FloatScalar]:
            ranked, draft, token = prepared
            g, below, upto = winner_pmf(ranked, beta, chains)
            return draft, g, below[token] / jnp.where(upto[token] > 0, upto[token], 1)

        return along_winners(key, scored, win_at, follow, jnp.zeros((), scored.p.dtype))


class Ranked(NamedTuple):
    """Tokens in the order of their ratios q / p, those of equal ratio by their numbers. All are by token, [V].

    Attributes:
      rank: int32.
      p: draft distribution.
      below: mass of p that ranks below the token.
      upto: mass of p up to the token.
    """

    rank: Int[Array, " vocab"]
    p: Probs
    below: Probs
    upto: Probs


def ranked_by_ratio(p: Probs, q: Probs) -> Ranked:
    """Returns the order of tokens by q / p, for p [V] and q [V]; tokens that are never drafted come last."""
    order = jnp.argsort(jnp.where(p > 0, q / jnp.where(p > 0, p, 1), jnp.inf))
    rank = jnp.zeros(len(p), jnp.int32).at[order].set(jnp.arange(len(p), dtype=jnp.int32))
    upto = jnp.minimum(cumulative(jnp, p[order]), 1)
    return Ranked(rank=rank, p=p, below=jnp.pad(upto[:-1], (1, 0))[rank], upto=upto[rank])


def winner_pmf(ranked: Ranked, beta: FloatScalar, chains: int) -> tuple[Probs, Probs, Probs]:
    """Returns by token [V] the winner's distribution g, and y below the token and up to it.

    Args:
      ranked: tokens at the node.
      beta: [] the share of paths that rank below, among those that rank below or pass through the node.
      chains: K, static.
    """
    below, upto = (beta + (1 - beta) * mass for mass in (ranked.below, ranked.upto))
    g = (
        ranked.p
        * _mixed_powers(upto, below, chains)
        / _mixed_powers(jnp.ones_like(beta), beta, chains)
    )
    return g, below, upto


def _mixed_powers(
    x: Float[Array, "*vocab"], y: Float[Array, "*vocab"], k: int
) -> Float[Array, "*vocab"]:
    """Returns the sum of x^j y^(k-1-j) over j = 0..k-1, which is (x^k - y^k) / (x - y)."""

    def add(
        _: IntScalar | int, carry: tuple[Float[Array, "*vocab"], Float[Array, "*vocab"]]
    ) -> tuple[Float[Array, "*vocab"], Float[Array, "*vocab"]]:
        total, power = carry
        return total * x + power, power * y

    total: Array = jax.lax.fori_loop(1, k, add, (jnp.ones_like(x), y), unroll=True)[0]
    return total
