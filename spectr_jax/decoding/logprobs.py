"""Log-probabilities of emitted tokens, from the logits of the call that verified them.

Shape suffixes: B sequences, N nodes, S tokens of a call, T tokens of a sequence, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spectr_jax.decoding.policy import shaped
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.verifiers.base import Selection


class Logprobs(NamedTuple):
    """Log-probabilities of tokens, float32.

    They are 0 for the prompt and after the end, and NaN for a token of -1.

    Attributes:
      policy: under the distribution that the tokens follow: the target's, after the policy.
      model: under the target's own distribution, at temperature 1.
    """

    policy: Float[Array, "batch time"]
    model: Float[Array, "batch time"]


def of_call(
    scored: ScoredTree, logits_BxNxV: Float[Array, "batch nodes vocab"], chosen: Selection
) -> Logprobs:
    """Returns the log-probabilities [B, S] of a call's tokens; undefined after the emitted ones.

    `scored` and `chosen` are batches. `logits_BxNxV` are the target's, before the policy's process.
    """
    above_BxS = jnp.pad(jnp.maximum(chosen.path, 0), ((0, 0), (1, 0)))  # The root comes first.
    tokens_BxSx1 = jnp.maximum(chosen.tokens, 0)[..., None]

    def rows(of_nodes: Float[Array, "batch nodes vocab"]) -> Float[Array, "batch steps vocab"]:
        return jnp.take_along_axis(of_nodes, above_BxS[..., None], axis=1)

    pmf_BxSxV = shaped(rows(scored.logits), scored.shaping)
    model_BxSxV = jax.nn.log_softmax(rows(logits_BxNxV).astype(jnp.float32), axis=-1)
    policy = jnp.log(jnp.take_along_axis(pmf_BxSxV, tokens_BxSx1, axis=-1)[..., 0])
    model = jnp.take_along_axis(model_BxSxV, tokens_BxSx1, axis=-1)[..., 0]
    known = chosen.tokens >= 0
    return Logprobs(
        policy=jnp.where(known, policy, jnp.nan), model=jnp.where(known, model, jnp.nan)
    )
