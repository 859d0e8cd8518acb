r"""Plans that name a winner among the drafts, and apply Algorithm 1 to it as a single draft.

The winner y has a known distribution g, and is accepted with probability

$$\min\left(1, \frac{q(y)}{g(y)}\right);$$

otherwise the token is drawn from (q - g)+. Such a plan is exact for any g. Block verification uses
`win` to decide on a whole path of winners at once (`decoding/verifiers/block.py`).
"""

import abc
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from spectr_jax.transport.base import Plan, exact_residual, or_else
from spectr_jax.transport.draws import draw, uniform
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Scalar, Valid

ExactWin: TypeAlias = tuple[Float[np.ndarray, " k"], ExactProbs]


class Winner(NamedTuple):
    """The winner among the drafts, and its distribution; undefined if no draft is valid."""

    index: Scalar  # type: ignore[assignment]  # Hides the method of tuples.
    pmf: Probs  # g, the distribution of its token given the number of drafts.


class WinnerPlan(Plan):
    """A plan that chooses the winner with probability min(1, q / g), else draws from (q - g)+.

    A subclass defines `win`, `exact_win` and `exact_acceptance`.
    """

    @abc.abstractmethod
    def win(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Winner:
        """Returns the winner; arguments as in `choose`."""

    @abc.abstractmethod
    def exact_win(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactWin:
        """Returns the probability [k] that each draft wins, and g [V], in float64."""

    def choose(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Scalar:
        accept_key, residual_key, win_key = jax.random.split(key, 3)
        index, g = self.win(win_key, p, q, drafts, valid)
        draft = drafts[index]
        uniforms = uniform(accept_key, drafts.shape)
        # This is u < q / g without the division, which fails for g = 0.
        accepted = valid[index] & (uniforms[index] * g[draft] < q[draft])
        residual = jnp.where(jnp.any(valid), or_else(jnp.maximum(q - g, 0), q), q)
        return jnp.where(accepted, draft, draw(residual_key, residual))

    def exact_pmf(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
        wins, g = self.exact_win(p, q, drafts)
        residual, result = exact_residual(g, q), np.zeros(len(q))
        for draft, probability in zip(drafts, wins, strict=True):
            accept = min(1.0, q[draft] / g[draft]) if g[draft] > 0 else 0.0
            result[draft] += probability * accept
            result += probability * (1 - accept) * residual
        return result


def highest_wins(final: Float[np.ndarray, "k cells"]) -> Float[np.ndarray, " k"]:
    """Returns the probability [k] that each draft of pmfs `final` [k, C] wins; ties are uniform."""
    k = len(final)
    below = np.cumsum(final, axis=1) - final
    # A draft with priority u within its cell wins if no other draft is above. The integral over u
    # breaks ties uniformly; Gauss-Legendre is exact for its polynomial of degree k - 1.
    nodes, weights = np.polynomial.legendre.leggauss(k // 2 + 1)
    beaten = below[:, :, None] + final[:, :, None] * (nodes + 1) / 2
    others = np.stack([np.prod(np.delete(beaten, i, axis=0), axis=0) for i in range(k)])
    return np.einsum("kc,kcn,n->k", final, others, weights / 2)
