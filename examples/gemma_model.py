"""Decodes with a Gemma 3 decoder of Google's `gemma` package, at toy size with random weights.

    pip install gemma               # 3.3.0 and kauldron 1.4.2, which needs TensorFlow
    python examples/gemma_model.py  # 40 seconds on two CPU cores

The package's cache writes all sequences of a batch at one slot. Under `vmap` each sequence has a
slot of its own, and the package's keys, values and positions are the rows of our cache.
"""

import dataclasses

import jax
import jax.numpy as jnp
from gemma import gm

from spectr_jax import FunctionalModel, check_model, generate, get_method
from spectr_jax.models import cache as caches
from spectr_jax.models.cache import Cache

LOCAL, GLOBAL = gm.nn.AttentionType.LOCAL_SLIDING, gm.nn.AttentionType.GLOBAL
CONFIG = gm.nn.config.TransformerConfig(
    num_embed=50,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    final_logit_softcap=None,
    use_post_attn_norm=True,
    use_post_ffw_norm=True,
    use_qk_norm=True,
    attention_types=(LOCAL, LOCAL, GLOBAL),
    sliding_window_size=5,
)
DECODER = gm.nn.Transformer(config=CONFIG, dtype=jnp.float32)


def init_cache(params: dict, batch: int, capacity: int) -> Cache:
    """Returns an empty cache: rows of keys, values and positions of each layer."""
    dtype = params["params"]["embedder"]["input_embedding"].dtype
    rows = CONFIG.init_cache(batch, dtype, cache_length=capacity)
    return Cache(without_ends(rows), jnp.zeros(batch, jnp.int32))


def without_ends(rows: dict) -> dict:
    """Returns rows without their ends, which are in `Cache.lengths`."""
    return {
        layer: {name: part for name, part in parts.items() if name != "end_index"}
        for layer, parts in rows.items()
    }


def extend(params, tokens_BxN, positions_BxN, visible_BxNxM, cache=None, pending=0, *, layers=None):
    """Returns logits [B, N, V] and the cache with the new rows."""
    types = CONFIG.attention_types[:layers]
    decoder = DECODER.clone(config=dataclasses.replace(CONFIG, attention_types=types))
    rows = None if cache is None else cache.rows
    mask_BxNxT, starts_B = caches.mask_and_starts(cache, visible_BxNxM, pending)

    def one(*sequence):
        tokens, positions, mask, rows, start = jax.tree.map(lambda row: row[None], sequence)
        if rows is not None:
            rows = {layer: parts | {"end_index": start} for layer, parts in rows.items()}
        out = decoder.apply(params, tokens, positions=positions, attention_mask=mask, cache=rows)
        new = None if rows is None else without_ends(out.cache)
        return jax.tree.map(lambda row: row[0], (out.logits.astype(jnp.float32), new))

    logits, new = jax.vmap(one)(tokens_BxN, positions_BxN, mask_BxNxT, rows, starts_B)
    # Rows of layers that did not run stay.
    return logits, None if cache is None else Cache(rows | new, cache.lengths)


def model(seed: int) -> FunctionalModel:
    """Returns a Gemma with random weights."""
    params = DECODER.init(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32))
    return FunctionalModel(
        jax.tree.map(lambda leaf: 5 * leaf, params),  # Otherwise all tokens are as likely.
        extend_fn=extend,
        init_cache_fn=init_cache,
        vocab_size=CONFIG.num_embed,
        context=64,
        layers=CONFIG.num_layers,
    )


def main() -> float:
    """Checks the target, decodes with it, and returns its tokens per call."""
    target, draft = model(seed=0), model(seed=1)
    check_model(target, layers=2)
    prompts, lengths = [[1, 2, 3], [4, 0, 0]], [3, 1]  # The second prompt is padded.
    method, key = get_method("otm_block", tree="2,1"), jax.random.key(0)
    out = generate(key, method, target, draft, prompts, lengths, 24)
    per_call = float(jnp.sum(out.lengths - jnp.array(lengths)) / jnp.sum(out.target_calls))
    print(f"{per_call:.2f} tokens per call of the target")
    return per_call


if __name__ == "__main__":
    main()
