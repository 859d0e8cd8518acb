"""Decodes with a model of your own, one layer of attention.

    python examples/own_model.py    # 10 seconds on two CPU cores

The model follows the protocol `spectr_jax.models.base.Model`. It scores any set of new tokens after
a committed prefix: `visible` says which new tokens see which, as in a tree.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax import check_model, generate, get_method
from spectr_jax.models import cache as caches
from spectr_jax.models.cache import Cache


class Attention(nnx.Module):
    """One attention layer between an embedding and a head."""

    def __init__(self, vocab_size: int, width: int, context: int, seed: int):
        rngs = nnx.Rngs(seed)
        self.vocab_size, self.context, self.layers = vocab_size, context, 1
        self.embed = nnx.Embed(vocab_size, width, rngs=rngs)
        self.positions = nnx.Embed(context, width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.head = nnx.Linear(width, vocab_size, rngs=rngs)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache: rows of keys and of values."""
        rows = jnp.zeros((batch, capacity, self.embed.features))
        return Cache((rows, rows), jnp.zeros(batch, jnp.int32))

    def extend(
        self, tokens_BxN, positions_BxN, visible_BxNxM, cache=None, pending=0, *, layers=None
    ):
        """Returns logits [B, N, V] and the cache with the new rows."""
        x = self.embed(tokens_BxN) + self.positions(positions_BxN)
        query, *new = jnp.split(self.qkv(x), 3, axis=-1)
        mask, starts_B = caches.mask_and_starts(cache, visible_BxNxM, pending)
        rows = None if cache is None else cache.rows
        (keys, values), rows = caches.append(rows, tuple(new), starts_B)
        scores = jnp.einsum("bne,bme->bnm", query, keys) / x.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        logits = self.head(x + jnp.einsum("bnm,bme->bne", weights, values))
        return logits, None if cache is None else Cache(rows, cache.lengths)


def main() -> float:
    """Checks the model, decodes with it, and returns the tokens per call of the target."""
    target, draft = (Attention(vocab_size=50, width=32, context=64, seed=seed) for seed in (0, 1))
    check_model(target)
    prompts, lengths = [[1, 2, 3], [4, 0, 0]], [3, 1]  # The second prompt is padded.
    method = get_method("otm_block", tree="2,1")
    out = generate(jax.random.key(0), method, target, draft, prompts, lengths, 24)
    per_call = float(jnp.sum(out.lengths - jnp.array(lengths)) / jnp.sum(out.target_calls))
    print(f"tokens: {out.tokens[0, : int(out.lengths[0])].tolist()}")
    print(f"{per_call:.2f} tokens per call of the target")
    return per_call


if __name__ == "__main__":
    main()
