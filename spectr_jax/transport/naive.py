r"""The naive plan: draw the token from q and see whether it is among the drafts: a reference point.

$$\alpha = \sum_x q(x) \left(1 - (1 - p(x))^k\right)$$

Repeated drafts do not help, and the token does not depend on the drafts: every other plan accepts more often.
"""

import jax.numpy as jnp
import numpy as np

from spectr_jax.transport.base import Choice, draw


def select(key, p, q, drafts, valid) -> Choice:
    """See `Plan.select`. Runs in the jitted sampler."""
    token = draw(key, q)
    return Choice(token, jnp.any(valid & (drafts == token)))


def law(p, q, drafts) -> np.ndarray:
    """See `Plan.law`: q, whatever the drafts."""
    return q


def acceptance(p, q, k) -> float:
    """See `Plan.acceptance`."""
    return np.sum(q * -np.expm1(k * np.log1p(-np.minimum(p, 1 - 1e-16))))
