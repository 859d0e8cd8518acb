"""Small drafts for large vocabularies: a narrow embedding, and a head over a part of the tokens.

With 50,000 tokens or more, most parameters of a small decoder are in its embedding and its head.
Here the embedding is of low rank (Lan et al., 2019, arXiv 1909.11942, section 3.1), and the head
scores frequent tokens only (FR-Spec: Zhao et al., 2025, arXiv 2502.14856). The other tokens have
probability 0 as drafts; the output still follows the target's distribution exactly.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from spectr_jax.models.layers.dense import dense_layer


class Constant(nnx.Variable):
    """Token ids or masks, which are not trained."""


class NarrowEmbed(nnx.Module):
    """An embedding of width `rank`, and a linear layer from it to `width`."""

    def __init__(self, vocab_size: int, rank: int, width: int, *, dtype, rngs: nnx.Rngs):
        self.table = nnx.Embed(vocab_size, rank, dtype=dtype, rngs=rngs)
        self.widen = dense_layer(rank, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns embeddings [..., E] of tokens [...]."""
        return self.widen(self.table(tokens))


class PartialHead(nnx.Module):
    """Logits of `kept` tokens out of V; those of the others are -inf.

    Attributes:
      tokens: int32 [kept], ids in ascending order.
    """

    def __init__(self, width: int, kept: int, vocab_size: int, *, dtype, rngs: nnx.Rngs):
        self.linear = dense_layer(width, kept, use_bias=False, dtype=dtype, rngs=rngs)
        self.tokens = Constant(jnp.arange(kept, dtype=jnp.int32))
        self.vocab_size = vocab_size

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits [..., V] of [..., E]."""
        logits = self.linear(x).astype(jnp.float32)
        everything = jnp.full((*x.shape[:-1], self.vocab_size), -jnp.inf)
        return everything.at[..., self.tokens[...]].set(
            logits, indices_are_sorted=True, unique_indices=True
        )


class SharedTokens(nnx.Module):
    """A model as a draft for another vocabulary, of V tokens.

    Tokens that are not `shared` have probability 0; the model reads token 0 instead of them.

    Attributes:
      model: the draft; shared tokens have the same ids in both vocabularies.
      shared: bool [V].
    """

    def __init__(self, model: Any, shared: ArrayLike):
        self.model = nnx.data(model)  # Any pytree that follows `Model`.
        self.shared = Constant(jnp.asarray(shared))
        self.vocab_size = len(self.shared[...])
        self.context, self.layers = model.context, model.layers

    def init_cache(self, batch, capacity):
        """See `Model.init_cache`."""
        return self.model.init_cache(batch, capacity)

    def extend(
        self, tokens_BxN, positions_BxN, visible_BxNxM, cache=None, pending=0, *, layers=None
    ):
        """See `Model.extend`."""
        known_BxN = jnp.where(self.shared[...][tokens_BxN], tokens_BxN, 0)
        logits, cache = self.model.extend(
            known_BxN, positions_BxN, visible_BxNxM, cache, pending, layers=layers
        )
        missing = max(self.vocab_size - logits.shape[-1], 0)
        logits_BxNxV = jnp.pad(logits, ((0, 0), (0, 0), (0, missing)))[..., : self.vocab_size]
        return jnp.where(self.shared[...], logits_BxNxV, -jnp.inf), cache
