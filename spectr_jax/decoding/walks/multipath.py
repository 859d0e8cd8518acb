r"""Phase 3 of a call (select): greedy multi-path block verification, GBV (Thomas and Pal, 2026, arXiv 2602.16961).

Of K i.i.d. chains one is chosen, and block verification (`decoding/walks/block.py`) decides how much of it to keep. The
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

import jax
import jax.numpy as jnp

from spectr_jax.decoding.policy import Policy
from spectr_jax.decoding.selection import Selection
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.walks.block import along_winners
from spectr_jax.transport.base import Plan
from spectr_jax.transport.otm import cumulative
from spectr_jax.transport.winner import Winner


def select(
    key: jax.Array,
    plan: Plan,
    tree: Tree,
    policy: Policy,
    length: jax.Array,
    tokens: jax.Array,
    p: jax.Array,
    logits: jax.Array,
) -> Selection:
    """As `selection.select`, for K i.i.d. chains; of the plan only the drafting rule is used. Consumes `key`."""
    chains = len(tree.levels[1])

    def win(beta, key, p, q, drafts, valid):
        del key  # Tokens of equal ratio are ranked by their numbers.
        rank, g, below, upto = ranked_winner(p, q, beta, chains)
        draft = jnp.argmax(jnp.where(valid, rank[drafts], -1))
        token = drafts[draft]
        return Winner(draft, g), below[token] / jnp.where(upto[token] > 0, upto[token], 1)

    return along_winners(key, win, jnp.zeros((), p.dtype), plan, tree, policy, length, tokens, p, logits)


def ranked_winner(p: jax.Array, q: jax.Array, beta, chains: int) -> tuple[jax.Array, ...]:
    """By token [V]: its rank, the winner's distribution g, and y below it and up to it.

    Args:
      p: [V] draft distribution at the node.
      q: [V] target distribution.
      beta: [] the share of paths that rank below, among those that rank below or pass through the node.
      chains: K, static.
    """
    order = jnp.argsort(jnp.where(p > 0, q / jnp.where(p > 0, p, 1), jnp.inf))
    rank = jnp.zeros(len(p), jnp.int32).at[order].set(jnp.arange(len(p), dtype=jnp.int32))
    head = jnp.minimum(cumulative(jnp, p[order]), 1)
    upto = beta + (1 - beta) * head
    below = jnp.concatenate([beta[None], upto[:-1]])
    g = p[order] * _mixed_powers(upto, below, chains) / _mixed_powers(jnp.ones_like(beta), beta, chains)
    return rank, g[rank], below[rank], upto[rank]


def _mixed_powers(x: jax.Array, y: jax.Array, k: int) -> jax.Array:
    """The sum of x^j y^(k-1-j) over j = 0..k-1, which is (x^k - y^k) / (x - y)."""

    def add(_, carry):
        total, power = carry
        return total * x + power, power * y

    return jax.lax.fori_loop(1, k, add, (jnp.ones_like(x), y))[0]
