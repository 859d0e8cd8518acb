"""Grouped-query attention (Ainslie et al., 2023), in the form that is fast where it runs.

Shape suffixes: B sequences, N new tokens, T slots, H query heads, K key and value heads, G = H / K, D head width, C = K D
channels.
"""

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.models.layers.layout import in_memory

FEW = 256
"""Up to so many new tokens x query heads x key and value heads a sequence, a CPU multiplies by those of all heads."""


def attention(q_BxNxHxD: jax.Array, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array, mask_BxNxT: jax.Array) -> jax.Array:
    """Float32 or narrower [B, N, H, D]; each key and value head serves `H / K` query heads, in order.

    Every new token sees at least one slot.
    """
    (_, N, H, _), K = q_BxNxHxD.shape, k_BxTxKxD.shape[2]
    if jax.default_backend() == "cpu":
        few = K > 1 and N * H * K <= FEW
        return (_by_all_heads if few else _heads_first)(q_BxNxHxD, k_BxTxKxD, v_BxTxKxD, mask_BxNxT)
    return jax.nn.dot_product_attention(q_BxNxHxD, k_BxTxKxD, v_BxTxKxD, mask=mask_BxNxT[:, None])


def causal(segments_BxN: jax.Array) -> jax.Array:
    """The mask of packed sequences: [B, N, N], a token sees itself and the tokens before it in its own segment."""
    N = segments_BxN.shape[-1]
    return jnp.tril(jnp.ones((N, N), bool)) & (segments_BxN[:, :, None] == segments_BxN[:, None, :])


def _by_all_heads(q_BxNxHxD, k_BxTxKxD, v_BxTxKxD, mask_BxNxT):
    """Queries padded with zeros to the channels of all heads, so that the products need no head of their own.

    For products by head XLA copies all keys and values into another order at every call: here they are read as they are.
    """
    # Done before they are padded, or XLA computes the rotation anew for each of the K copies (in float32 it still does).
    q_BxNxHxD = jax.lax.optimization_barrier(q_BxNxHxD)
    (B, N, H, D), (T, K) = q_BxNxHxD.shape, k_BxTxKxD.shape[1:3]
    own_HxK = np.repeat(np.eye(K), H // K, axis=0)[:, :, None]
    q_BxNHxC = (q_BxNxHxD[:, :, :, None] * own_HxK.astype(q_BxNxHxD.dtype)).reshape(B, N * H, K * D)
    k_BxTxC, v_BxTxC = k_BxTxKxD.reshape(B, T, K * D), v_BxTxKxD.reshape(B, T, K * D)
    # Keys first, and left so: XLA puts the second factor into an order of its own at every call, here the small one.
    scores_BxTxNH = jnp.einsum("btc,bnc->btn", k_BxTxC, q_BxNHxC, preferred_element_type=jnp.float32)
    scores = jnp.swapaxes(jax.lax.optimization_barrier(scores_BxTxNH), 1, 2)
    weights = _weights(scores, jnp.repeat(mask_BxNxT, H, axis=1), D)
    mixed = jnp.einsum("bnt,btc->bnc", weights.astype(v_BxTxC.dtype), v_BxTxC, preferred_element_type=jnp.float32)
    mixed = mixed.reshape(B, N, K, H // K, K, D)
    # Slices: a sum over masked heads would be fused into the product, which then takes seven times as long.
    mixed_BxNxHxD = jnp.stack([mixed[:, :, head, :, head] for head in range(K)], axis=2).reshape(B, N, H, D)
    return mixed_BxNxHxD.astype(q_BxNxHxD.dtype)


def _heads_first(q_BxNxHxD, k_BxTxKxD, v_BxTxKxD, mask_BxNxT):
    """Heads before tokens in memory, which XLA's products by head take half as long for, forwards and backwards."""
    (B, N, H, D), K = q_BxNxHxD.shape, k_BxTxKxD.shape[2]
    q_BxKxGNxD = in_memory(q_BxNxHxD.reshape(B, N, K, H // K, D).transpose(0, 2, 3, 1, 4)).reshape(B, K, -1, D)
    k_BxKxTxD, v_BxKxTxD = in_memory(jnp.moveaxis(k_BxTxKxD, 2, 1)), in_memory(jnp.moveaxis(v_BxTxKxD, 2, 1))
    scores = jnp.einsum("bknd,bktd->bknt", q_BxKxGNxD, k_BxKxTxD, preferred_element_type=jnp.float32)
    weights = _weights(scores, jnp.tile(mask_BxNxT[:, None], (1, 1, H // K, 1)), D).astype(v_BxTxKxD.dtype)
    mixed = jnp.einsum("bknt,bktd->bknd", weights, v_BxKxTxD, preferred_element_type=jnp.float32)
    mixed_BxNxHxD = mixed.reshape(B, H, N, D).swapaxes(1, 2)
    return mixed_BxNxHxD.astype(q_BxNxHxD.dtype)


def _weights(scores: jax.Array, mask: jax.Array, width: int) -> jax.Array:
    hidden = jnp.finfo(jnp.float32).min / 2
    return jax.nn.softmax(jnp.where(mask, scores / np.sqrt(width), hidden), axis=-1)
