"""A bigram model: the tokens that most often follow each token.

It starts the table of recycled tokens (`decoding.drafters.recall`), and can draft for any verifier.
`spectr_jax.tabulate` makes one for any target.

Shape suffixes: B sequences, N new tokens, M pending and new tokens, V vocabulary, R ranks.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.models.cache import Cache
from spectr_jax.models.vocabulary import Constant
from spectr_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class BigramConfig:
    """The shape of a `Bigram`.

    Attributes:
      ranks: the number of next tokens of each token.
      context: the context of its target.
      dtype: of the stored log-probabilities.

    Raises:
      UserError: a field is not positive, or there are more ranks than tokens.
    """

    vocab_size: int
    ranks: int
    context: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.ranks, self.context) < 1 or self.ranks > self.vocab_size:
            sizes = f"vocab_size={self.vocab_size}, ranks={self.ranks}, context={self.context}"
            raise UserError(f"{sizes}: must be positive, with at most vocab_size ranks")


def token_dtype(vocab_size: int) -> Any:
    """Returns the dtype of stored tokens."""
    return jnp.uint16 if vocab_size <= 2**16 else jnp.int32


class Bigram(nnx.Module):
    """A model whose next-token distribution depends on the last token alone.

    Attributes:
      tokens: [V, R], the next tokens of each token, likeliest first; uint16 if they fit, else int32.
      log_probs: [V, R], their log-probabilities; all other tokens have probability 0.
    """

    def __init__(self, config: BigramConfig):
        shape = config.vocab_size, config.ranks
        self.config, self.layers = config, 1
        self.vocab_size, self.context = config.vocab_size, config.context
        self.tokens = Constant(jnp.zeros(shape, token_dtype(config.vocab_size)))
        self.log_probs = nnx.Param(jnp.zeros(shape, config.dtype))

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns a cache without rows: nothing before the last token matters."""
        return Cache((), jnp.zeros(batch, jnp.int32))

    def extend(
        self,
        tokens_BxN: jax.Array,
        positions_BxN: jax.Array,
        visible_BxNxM: jax.Array,
        cache: Cache | None = None,
        pending: int = 0,
        *,
        layers: int | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """See `Model.extend`."""
        next_BxNxR = self.tokens[...][tokens_BxN].astype(jnp.int32)
        log_probs_BxNxR = self.log_probs[...][tokens_BxN].astype(jnp.float32)
        none = jnp.full((*tokens_BxN.shape, self.vocab_size), -jnp.inf)
        return jnp.put_along_axis(none, next_BxNxR, log_probs_BxNxR, -1, inplace=False), cache
