"""The KV cache: one row per token that a model has run on, with a length per sequence.

Slots [0, length) of a sequence hold its committed tokens. The slots after them are *pending*: a
call appends its new tokens there (a draft tree, level by level), and `keep` moves the rows of the
accepted path to the front of that region and commits them. The prefix is stored once for any number
of drafts, and no sequence waits for another.

Shape suffixes: B sequences, T slots, N new tokens, M pending and new tokens, D rows of a path.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from spectr_jax.models.layers import cpu


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The rows of a model's earlier tokens.

    Attributes:
      rows: pytree of arrays [B, T, ...], one row per slot; only the model knows their meaning.
      lengths: [B] int32, number of committed slots of each sequence.
    """

    rows: Any
    lengths: jax.Array


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an empty buffer [B, T, ...] for rows of `dtype`, to be used with `write` and `read`.

    A CPU stores bfloat16 rows of a batch as the integers of their bits. It has no scattered writes
    of bfloat16, and would convert the whole buffer to float32 and back at each one. No gradients
    flow through those (`differentiable`).
    """
    bits = shape[0] > 1 and jnp.dtype(dtype) == jnp.bfloat16 and cpu.on_cpu()
    return jnp.zeros(shape, jnp.uint16 if bits else dtype)


def read(buffer_BT: jax.Array) -> jax.Array:
    """Returns the rows of a buffer of `zeros` in their dtype."""
    return (
        jax.lax.bitcast_convert_type(buffer_BT, jnp.bfloat16)
        if buffer_BT.dtype == jnp.uint16
        else buffer_BT
    )


def differentiable(cache: Cache) -> Cache:
    """Returns the same cache with rows in their dtype, through which gradients flow."""
    return dataclasses.replace(cache, rows=jax.tree.map(read, cache.rows))


def write(buffer_BT: jax.Array, rows_BN: jax.Array, starts_B: jax.Array) -> jax.Array:
    """Writes `rows_BN` [B, N, ...] into slots [start, start + N) of each sequence of `buffer_BT`
    [B, T, ...].

    Floats that go into uint16 go there as the bits of bfloat16 (`zeros`).
    """
    if buffer_BT.dtype == jnp.uint16 and jnp.issubdtype(rows_BN.dtype, jnp.floating):
        rows_BN = jax.lax.bitcast_convert_type(rows_BN.astype(jnp.bfloat16), jnp.uint16)
    return _written(buffer_BT, rows_BN.astype(buffer_BT.dtype), starts_B)


def _written(buffer_BT, rows_BN, starts_B):
    def write_one(buffer, rows, start):
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start, axis=0)

    def write_with_neighbour(buffer, rows, start):
        first = jnp.clip(start, 0, len(buffer) - 2)
        two = jax.lax.dynamic_slice_in_dim(buffer, first, 2, axis=0)
        return write_one(buffer, write_one(two, rows, start - first), first)

    if (
        len(buffer_BT) == 1 and not cpu.on_cpu()
    ):  # Under `vmap` it is a scatter, which takes two kernels on a GPU.
        return jax.lax.dynamic_update_slice_in_dim(buffer_BT, rows_BN, starts_B[0], axis=1)
    # On a CPU XLA moves the write of one row after a reshape of the buffer, and keeps two copies,
    # one of each shape.
    alone = cpu.on_cpu() and rows_BN.shape[:2] == (1, 1) and buffer_BT.shape[1] > 1
    return jax.vmap(write_with_neighbour if alone else write_one)(buffer_BT, rows_BN, starts_B)


def visible_slots(visible_BxNxM: jax.Array, lengths_B: jax.Array, capacity: int) -> jax.Array:
    """Returns a mask over slots from the visibility among pending and new tokens.

    Args:
      visible_BxNxM: bool; entry (i, j) says that new token i sees token j, where j counts pending
        tokens first, then new ones.
      lengths_B: number of committed slots, which are always visible.
      capacity: T.

    Returns:
      bool [B, N, T].
    """
    M = visible_BxNxM.shape[-1]
    offset_BxT = jnp.arange(capacity) - lengths_B[:, None]
    pending_BxNxT = jnp.take_along_axis(
        visible_BxNxM, jnp.clip(offset_BxT, 0, M - 1)[:, None, :], axis=-1
    )
    return jnp.where(offset_BxT[:, None, :] < 0, True, pending_BxNxT & (offset_BxT < M)[:, None, :])


def keep(cache: Cache, path_BxD: jax.Array, lengths_B: jax.Array, settled: int = 0) -> Cache:
    """Commits pending rows.

    Args:
      cache: has pending rows after its committed ones.
      path_BxD: int32, the pending index of each row to keep, in order; entries past the new length
        are ignored.
      lengths_B: the new lengths, at most `settled + D` above the old ones.
      settled: static number of pending rows that come first and are kept where they are.

    Returns:
      The cache with those rows moved to the slots right after the old lengths and the settled rows.
    """

    if not path_BxD.shape[1]:
        return dataclasses.replace(cache, lengths=lengths_B)

    def gather_one(buffer, length, path):
        return buffer.at[length + path].get(mode="clip")

    buffers, structure = jax.tree.flatten(cache.rows)
    kept = [jax.vmap(gather_one)(buffer_BT, cache.lengths, path_BxD) for buffer_BT in buffers]
    if not cpu.on_cpu() and len({(rows.shape, rows.dtype) for rows in kept}) == 1:
        # One kernel on a GPU for all layers instead of one each.
        kept = list(jax.lax.optimization_barrier(jnp.stack(kept)))
    written = [write(*both, cache.lengths + settled) for both in zip(buffers, kept, strict=True)]
    return Cache(jax.tree.unflatten(structure, written), lengths_B)
