"""Decodes with a model of Flax Linen, by functions of its parameters.

    python examples/linen_model.py    # 10 seconds on two CPU cores

A `FunctionalModel` takes functions and parameters of any JAX library in the same way. A pytree that
has the methods itself, such as an Equinox module, needs no `FunctionalModel`.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from spectr_jax import FunctionalModel, check_model, generate, get_method
from spectr_jax.models import cache as caches
from spectr_jax.models.cache import Cache

VOCABULARY, WIDTH, CONTEXT = 50, 32, 64


class Decoder(nn.Module):
    """One attention layer between an embedding and a head."""

    @nn.compact
    def __call__(self, tokens_BxN, positions_BxN, mask_BxNxT, rows=None, starts_B=None):
        """Returns logits [B, N, V], and the rows of keys and values with the new ones."""
        x = nn.Embed(VOCABULARY, WIDTH)(tokens_BxN)
        x += nn.Embed(CONTEXT, WIDTH)(positions_BxN)
        query, *new = jnp.split(nn.Dense(3 * WIDTH)(x), 3, axis=-1)
        (keys, values), rows = caches.append(rows, tuple(new), starts_B)
        scores = jnp.einsum("bne,bme->bnm", query, keys) / WIDTH**0.5
        weights = nn.softmax(jnp.where(mask_BxNxT, scores, -jnp.inf), axis=-1)
        x += jnp.einsum("bnm,bme->bne", weights, values)
        return nn.Dense(VOCABULARY)(x), rows


DECODER = Decoder()


def init_cache(params, batch: int, capacity: int) -> Cache:
    """Returns an empty cache: rows of keys and of values."""
    rows = jnp.zeros((batch, capacity, WIDTH))
    return Cache((rows, rows), jnp.zeros(batch, jnp.int32))


def extend(params, tokens_BxN, positions_BxN, visible_BxNxM, cache=None, pending=0, *, layers=None):
    """Returns logits [B, N, V] and the cache with the new rows."""
    mask, starts_B = caches.mask_and_starts(cache, visible_BxNxM, pending)
    rows = None if cache is None else cache.rows
    logits, rows = DECODER.apply(params, tokens_BxN, positions_BxN, mask, rows, starts_B)
    return logits, None if cache is None else Cache(rows, cache.lengths)


def model(seed: int) -> FunctionalModel:
    """Returns a model with random parameters."""
    one = jnp.ones((1, 1), jnp.int32)
    return FunctionalModel(
        DECODER.init(jax.random.key(seed), one, one, one[..., None]),
        extend_fn=extend,
        init_cache_fn=init_cache,
        vocab_size=VOCABULARY,
        context=CONTEXT,
        layers=1,
    )


def main() -> float:
    """Checks the target, decodes with it, and returns its tokens per call."""
    target, draft = model(seed=0), model(seed=1)
    check_model(target)
    prompts, lengths = [[1, 2, 3], [4, 0, 0]], [3, 1]  # The second prompt is padded.
    method, key = get_method("otm_block", tree="2,1"), jax.random.key(0)
    out = generate(key, method, target, draft, prompts, lengths, 24)
    per_call = float(jnp.sum(out.lengths - jnp.array(lengths)) / jnp.sum(out.target_calls))
    print(f"{per_call:.2f} tokens per call of the target")
    return per_call


if __name__ == "__main__":
    main()
