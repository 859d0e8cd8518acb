r"""k-sequential selection, K-SEQ, at gamma* (SpecTr, Algorithm 2 and Theorem 2).

Drafts are tried in turn, and each is accepted with probability min(1, q(x) / (gamma p(x))). If none
is accepted, the token is drawn from the residual distribution (5). The plan is valid for every
gamma >= gamma*, where gamma* solves (6),

$$1 - (1 - \beta)^k = \gamma \beta, \qquad \beta(\gamma) = \sum_x \min\left(p(x),
\frac{q(x)}{\gamma}\right).$$

Divided by beta, this equation is S_k = gamma. The residual before normalisation and the probability
that a draft passes its test are

$$S_k(\beta) = \sum_{i=0}^{k-1} (1 - \beta)^i, \qquad r(x) = q(x) - \min\left(p(x),
\frac{q(x)}{\gamma}\right) S_k(\beta), \qquad p_{\mathrm{acc}} = 1 - (1 - \beta)^k.$$

This form never divides by a number that may be 0. It gives exactly gamma = S = 1 for k = 1
(Algorithm 1), and gamma = k for disjoint supports.
"""

import dataclasses
import numbers

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.transport import iopt
from spectr_jax.transport.base import or_else
from spectr_jax.transport.draws import draw, uniform
from spectr_jax.transport.types import DraftTokens, ExactProbs, Key, Probs, Scalar, Valid
from spectr_jax.utils.errors import UserError

STEPS = 12
"""The number of Newton steps, each a pass over the vocabulary. On 1,500 varied pairs, 10 steps gave
|S_k - gamma| < 4e-6. With one dominant token and p close to q, it was 2e-5 at k = 8 and 9e-4 at
k = 64; `sequential` corrects this."""


@dataclasses.dataclass(frozen=True)
class KSeq(iopt.SequentialPlan):
    """K-SEQ. Its acceptance is highest at gamma*.

    Attributes:
      gamma: at least 1; a value below gamma* is replaced by gamma*, so the default is gamma*. None
        stands for the number of drafts, which is valid for all p and q and needs no search.

    Raises:
      UserError: gamma is less than 1, or infinite in float32.
    """

    gamma: float | None = 1.0

    def __post_init__(self) -> None:
        gamma, most = self.gamma, float(np.finfo(np.float32).max)
        if gamma is None or (isinstance(gamma, numbers.Real) and 1 <= gamma <= most):
            return
        raise UserError(f"gamma={gamma!r}: must be at least 1; give one in [1, k], or None for k")

    def choose(self, key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid) -> Scalar:
        k = jnp.sum(valid)
        if self.gamma is None:
            gamma = jnp.maximum(k, 1).astype(p.dtype)
        else:
            gamma = optimal_gamma(p, q, k, len(drafts))
            # At 1 a maximum would only change the rounding.
            gamma = gamma if self.gamma == 1 else jnp.maximum(self.gamma, gamma)
        return sequential(key, p, q, drafts, valid, gamma)

    def stages(self, p: ExactProbs, q: ExactProbs, k: int) -> iopt.Stages:
        # Algorithm 2 in the form of SpecTr++: each alpha is 1 / gamma, for all tokens.
        gamma = k if self.gamma is None else max(self.gamma, optimal_gamma_exact(p, q, k))
        return iopt.Stages(np.full(k, 1 / gamma), np.ones((k, len(q)), bool))


def sequential(
    key: Key, p: Probs, q: Probs, drafts: DraftTokens, valid: Valid, gamma: float | Scalar
) -> Scalar:
    """Returns a token, chosen by SpecTr's Algorithm 2 at any gamma >= gamma*; consumes `key`.

    Below gamma* the drafts would pass too often: S_k > gamma. If the search ends slightly below
    gamma*, the drafts may pass only with probability gamma / S_k, which keeps the plan exact.
    """
    accept_key, residual_key = jax.random.split(key)
    uniforms = uniform(accept_key, (len(drafts) + 1,))
    shared = jnp.minimum(p, q / gamma)
    total = _geometric_sum(jnp.sum(shared), jnp.sum(valid), len(drafts))[0]
    # This is u < q / (gamma p) without the division, which fails for p = 0.
    passes = valid & (uniforms[:-1] * gamma * p[drafts] < q[drafts])
    passes &= uniforms[-1] * total < gamma
    residual = or_else(jnp.maximum(q - shared * jnp.minimum(total, gamma), 0), q)
    return jnp.where(jnp.any(passes), drafts[jnp.argmax(passes)], draw(residual_key, residual))


def optimal_gamma(p: Probs, q: Probs, k: Scalar, most: int) -> Scalar:
    """Returns gamma* for a traced k <= `most`: the fixed point of S_k(beta(gamma)) (Lemma 3).

    Runs Newton's method within a bracket. S_k(beta(gamma)) rises with gamma, so it lies between
    gamma and gamma*, and becomes an end of the bracket. A Newton step that would leave the bracket
    is replaced by the bracket's midpoint.
    """

    def step(_: Scalar, carry: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
        gamma, low, high = carry
        total, slope = _geometric_sum(jnp.sum(jnp.minimum(p, q / gamma)), k, most)
        f = total - gamma
        low, high = jnp.where(f > 0, total, low), jnp.where(f > 0, high, total)
        rise = slope * jnp.sum(jnp.where(q < gamma * p, q, 0)) / gamma**2
        newton = gamma + f / jnp.maximum(1 - rise, 1e-3)
        return jnp.where((newton >= low) & (newton <= high), newton, (low + high) / 2), low, high

    one = jnp.ones((), p.dtype)
    start = one, one, jnp.maximum(k.astype(p.dtype), one)
    return jax.lax.fori_loop(0, STEPS, step, start)[0]


def optimal_gamma_exact(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns gamma* in float64."""
    return 1 / iopt.saturating_alpha(p, q, k)


def _geometric_sum(beta: Scalar, k: Scalar, most: int) -> tuple[Scalar, Scalar]:
    """Returns S_k(beta) and -dS_k/dbeta for a traced `k <= most`; both 0 for k = 0."""
    index = jnp.arange(most)
    powers = jnp.where(index < k, (1 - beta) ** index.astype(beta.dtype), 0)
    derivatives = index[1:] * powers[:-1] * (index[1:] < k)
    return jnp.sum(powers), jnp.sum(derivatives)
