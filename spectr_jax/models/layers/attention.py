"""Grouped-query attention (Ainslie et al., 2023), in the form that is fast where it runs.

Shape suffixes: B sequences, N new tokens, T slots, H query heads, K key and value heads, G = H / K,
D head width.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.models.layers import cpu
from spectr_jax.utils import backend

SCORES = 2**30
"""Bytes of float32 scores of all heads above which an accelerator takes new tokens in blocks."""


def attention(
    q_BxNxHxD: jax.Array,
    k_BxTxKxD: jax.Array,
    v_BxTxKxD: jax.Array,
    mask_BxNxT: jax.Array,
    cap: float = 0.0,
) -> jax.Array:
    """Returns attention [B, N, H, D] in the dtype of the queries.

    Each key and value head serves H / K query heads, in order. Every new token must see at least one slot.
    With a `cap`, scores s become cap * tanh(s / cap), as in Gemma 2.
    """
    few, kv = q_BxNxHxD.shape[1] <= cpu.MOST_QUERIES, (k_BxTxKxD, v_BxTxKxD)
    same = k_BxTxKxD.dtype == v_BxTxKxD.dtype
    if few and not cap and same and cpu.kernels_multiply(q_BxNxHxD, k_BxTxKxD):
        return cpu.attention(_heads_first)(q_BxNxHxD, *kv, mask_BxNxT)
    if backend.on_cpu():
        return _heads_first(q_BxNxHxD, *kv, mask_BxNxT, cap)

    def attend(q, mask):
        if cap:
            return _heads_first(q, *kv, mask, cap)
        return jax.nn.dot_product_attention(q, *kv, mask=mask[:, None])

    B, N, H, _ = q_BxNxHxD.shape
    if (blocks := -(-4 * B * N * H * k_BxTxKxD.shape[1] // SCORES)) > 1:
        return _in_blocks(attend, min(blocks, N), q_BxNxHxD, mask_BxNxT)
    return attend(q_BxNxHxD, mask_BxNxT)


def _in_blocks(attend: Callable, blocks: int, q_BxNxHxD, mask_BxNxT):
    """Returns `attend(q, mask)`, computed in blocks of new tokens that run one after another."""
    N = q_BxNxHxD.shape[1]

    def split(x_BxN):
        # The last block is padded with tokens that see all slots.
        padding = [(0, 0), (0, -N % blocks), *[(0, 0)] * (x_BxN.ndim - 2)]
        padded = jnp.pad(x_BxN, padding, constant_values=1)
        return jnp.moveaxis(padded.reshape(len(x_BxN), blocks, -1, *x_BxN.shape[2:]), 1, 0)

    def of_block(block):
        return attend(*block)

    mixed = jax.lax.map(of_block, (split(q_BxNxHxD), split(mask_BxNxT)))
    mixed = jnp.moveaxis(mixed, 0, 1)
    return mixed.reshape(len(mixed), -1, *mixed.shape[3:])[:, :N]


def causal(segments_BxN: jax.Array) -> jax.Array:
    """Returns the causal mask [B, N, N] within each segment; a token also sees itself."""
    N = segments_BxN.shape[-1]
    return jnp.tril(jnp.ones((N, N), bool)) & (segments_BxN[:, :, None] == segments_BxN[:, None, :])


def _heads_first(q_BxNxHxD, k_BxTxKxD, v_BxTxKxD, mask_BxNxT, cap=0.0):
    """Returns `attention`, with heads before tokens in memory.

    XLA's products by head then take half as long on a CPU, forward and backward.
    """
    (B, N, H, D), K = q_BxNxHxD.shape, k_BxTxKxD.shape[2]
    q_BxKxGxNxD = q_BxNxHxD.reshape(B, N, K, H // K, D).transpose(0, 2, 3, 1, 4)
    q_BxKxGNxD = cpu.in_memory(q_BxKxGxNxD).reshape(B, K, -1, D)
    k_BxKxTxD, v_BxKxTxD = (
        cpu.in_memory(jnp.moveaxis(part, 2, 1)) for part in (k_BxTxKxD, v_BxTxKxD)
    )
    scores = jnp.einsum(
        "bknd,bktd->bknt", q_BxKxGNxD, k_BxKxTxD, preferred_element_type=jnp.float32
    )
    hidden = jnp.finfo(jnp.float32).min / 2
    visible = jnp.tile(mask_BxNxT[:, None], (1, 1, H // K, 1))
    scores = scores / np.sqrt(D)
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    weights = jax.nn.softmax(jnp.where(visible, scores, hidden), axis=-1)
    weights = weights.astype(v_BxTxKxD.dtype)
    mixed = jnp.einsum("bknt,bktd->bknd", weights, v_BxKxTxD, preferred_element_type=jnp.float32)
    return mixed.reshape(B, H, N, D).swapaxes(1, 2).astype(q_BxNxHxD.dtype)
