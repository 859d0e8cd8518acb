"""Log-probabilities of emitted tokens, from the logits of the call of the target that verified them.

Shape suffixes: B sequences, N nodes, S tokens of a call, T tokens of a sequence, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spectr_jax.decoding.policy import probabilities
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.verifiers.base import Selection


class Logprobs(NamedTuple):
    """Log-probabilities of tokens, float32; 0 for the prompt and after the end, NaN for -1, where there was no distribution.

    Attributes:
      policy: under the distribution that the policy makes of the target's logits, which the tokens were drawn from.
      model: under the target's own distribution, at temperature 1.
    """

    policy: Float[Array, "batch time"]
    model: Float[Array, "batch time"]


def of_call(
    scored: ScoredTree, logits_BxNxV: Float[Array, "batch nodes vocab"], chosen: Selection
) -> Logprobs:
    """Returns the log-probabilities [B, S] of the tokens of a call; those after the emitted ones are undefined.

    Args:
      scored: of all sequences.
      logits_BxNxV: the target's own, before the policy's `process`.
      chosen: the tokens, and the path of nodes that they follow.
    """
    above_BxS = jnp.pad(
        jnp.maximum(chosen.path, 0), ((0, 0), (1, 0))
    )  # The first token follows the root.
    tokens_BxSx1 = jnp.maximum(chosen.tokens, 0)[..., None]

    def rows(of_nodes: Float[Array, "batch nodes vocab"]) -> Float[Array, "batch steps vocab"]:
        return jnp.take_along_axis(of_nodes, above_BxS[..., None], axis=1)

    pmf_BxSxV = probabilities(rows(scored.logits), scored.policy)
    own_BxSxV = jax.nn.log_softmax(rows(logits_BxNxV).astype(jnp.float32), axis=-1)
    policy = jnp.log(jnp.take_along_axis(pmf_BxSxV, tokens_BxSx1, axis=-1)[..., 0])
    model = jnp.take_along_axis(own_BxSxV, tokens_BxSx1, axis=-1)[..., 0]
    return Logprobs(*(jnp.where(chosen.tokens >= 0, each, jnp.nan) for each in (policy, model)))


def written(all_BxT: Logprobs, new_BxS: Logprobs, starts_B: Int[Array, " batch"]) -> Logprobs:
    """Returns the log-probabilities of sequences, with those of a call from `starts_B` on."""

    def write(row: Array, new: Array, start: Array) -> Array:
        updated: Array = jax.lax.dynamic_update_slice_in_dim(row, new, start, 0)
        return updated

    return Logprobs(
        *(jax.vmap(write)(*each, starts_B) for each in zip(all_BxT, new_BxS, strict=True))
    )
