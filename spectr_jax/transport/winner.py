r"""Plans that name a winner among the drafts, with a known distribution g, and apply Algorithm 1 to
it as a single draft.

$$P(\text{accept the winner } y) = \min\left(1, \frac{q(y)}{g(y)}\right), \qquad \text{else a draw
from } (q - g)_+$$

Such a plan is exact for any g that can be realised, and it has a function `win` from which its
`select` follows. Block verification needs `win` too: it decides on a whole path of winners at once
(`decoding/verifiers/block.py`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PRNGKeyArray

from spectr_jax.transport.base import Choice, draw, or_else
from spectr_jax.transport.types import Drafts, ExactProbs, IntScalar, Probs, Valid


class Winner(NamedTuple):
    """The winner among the drafts.

    Attributes:
      draft: [] int32, the index of the winning draft; undefined if none is valid.
      pmf: [V] g, the distribution of its token for that number of drafts; undefined if there are
        none.
    """

    draft: IntScalar
    pmf: Probs


def select_winner(
    win: Callable[..., Winner], key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid
) -> Choice:
    """Accepts the winner y with probability min(1, q(y) / g(y)), else draws from (q - g)+; consumes
    `key`."""
    accept_key, residual_key, win_key = jax.random.split(key, 3)
    first, g = win(win_key, p, q, drafts, valid)
    draft = drafts[first]
    uniforms = jax.random.uniform(accept_key, drafts.shape, p.dtype)
    # u < q / g without the division: right for g = 0, and never true for q = 0.
    accepted = valid[first] & (uniforms[first] * g[draft] < q[draft])
    residual = jnp.where(jnp.any(valid), or_else(jnp.maximum(q - g, 0), q), q)
    token = jnp.where(accepted, draft, draw(residual_key, residual))
    return Choice(token, jnp.any(valid & (drafts == token)))


def winner_accepted_pmf(
    q: ExactProbs, g: ExactProbs, drafts: Sequence[int], wins: Float[np.ndarray, " k"]
) -> ExactProbs:
    """Returns the distribution [V] of the token in float64, if each of `drafts` wins with the
    probability in `wins`."""
    residual = np.maximum(q - g, 0)
    residual = residual / residual.sum() if residual.sum() > 0 else q
    result = np.zeros(len(q))
    for draft, probability in zip(drafts, wins, strict=True):
        accept = min(1.0, q[draft] / g[draft]) if g[draft] > 0 else 0.0
        result[draft] += probability * accept
        result += probability * (1 - accept) * residual
    return result


def highest_wins(final: Float[np.ndarray, "k cells"]) -> Float[np.ndarray, " k"]:
    """Returns the probability [k] that each draft is highest, ties broken uniformly; `final` [k, C]
    is its cell's pmf."""
    k = len(final)
    below = np.cumsum(final, axis=1) - final
    # A draft at priority u within its cell wins if no other is above; the integral over u breaks
    # ties uniformly, and Gauss-Legendre is exact for its integrand, a polynomial of degree k - 1.
    nodes, weights = np.polynomial.legendre.leggauss(k // 2 + 1)
    beaten = below[:, :, None] + final[:, :, None] * (nodes + 1) / 2
    others = np.stack([np.prod(np.delete(beaten, i, axis=0), axis=0) for i in range(k)])
    wins: Float[np.ndarray, " k"] = np.einsum("kc,kcn,n->k", final, others, weights / 2)
    return wins
