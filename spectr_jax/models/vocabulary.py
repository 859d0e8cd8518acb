"""What makes a draft for a large vocabulary small: a narrow embedding, and a head over a part of the tokens.

Most parameters of a small decoder with a vocabulary of 50,000 tokens or more are its embedding and its head. Here the
embedding has few numbers a token (Lan et al., 2019, arXiv 1909.11942, section 3.1), and the head scores the tokens that are
frequent (FR-Spec: Zhao et al., 2025, arXiv 2502.14856). All others have probability 0 as drafts; the output still follows
the target's distribution exactly, on all tokens.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.models.dense import dense_layer


class Kept(nnx.Variable):
    """Token ids, int32, which are not trained."""


class NarrowEmbed(nnx.Module):
    """An embedding of `rank` numbers a token, and a linear layer from them to the width."""

    def __init__(self, vocab_size: int, rank: int, width: int, *, dtype, rngs: nnx.Rngs):
        self.table = nnx.Embed(vocab_size, rank, dtype=dtype, rngs=rngs)
        self.widen = dense_layer(rank, width, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[..., E] of tokens [...]."""
        return self.widen(self.table(tokens))


class PartialHead(nnx.Module):
    """Logits of `kept` tokens out of V; those of the others are -inf.

    Attributes:
      tokens: int32 [kept], ids in ascending order.
    """

    def __init__(self, width: int, kept: int, vocab_size: int, *, dtype, rngs: nnx.Rngs):
        self.linear = dense_layer(width, kept, use_bias=False, dtype=dtype, rngs=rngs)
        self.tokens = Kept(jnp.arange(kept, dtype=jnp.int32))
        self.vocab_size = vocab_size

    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [..., V] of [..., E]."""
        logits = self.linear(x).astype(jnp.float32)
        everything = jnp.full((*x.shape[:-1], self.vocab_size), -jnp.inf)
        return everything.at[..., self.tokens[...]].set(logits, indices_are_sorted=True, unique_indices=True)
