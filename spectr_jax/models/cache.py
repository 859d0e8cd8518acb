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

from spectr_jax.utils import backend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The rows of a model's earlier tokens.

    Attributes:
      rows: pytree of arrays [B, T, ...], one row per slot; each model defines their content.
      lengths: [B] int32, number of committed slots of each sequence.
    """

    rows: Any
    lengths: jax.Array


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an empty buffer [B, T, ...] for rows of `dtype`, to be used with `write` and `read`.

    On a CPU, bfloat16 rows of a batch are stored as the integers of their bits: XLA has no
    scattered writes of bfloat16 there, and would convert the whole buffer to float32 and back at
    each write. No gradients flow through integers (`differentiable`).
    """
    bits = shape[0] > 1 and jnp.dtype(dtype) == jnp.bfloat16 and backend.on_cpu()
    return jnp.zeros(shape, jnp.uint16 if bits else dtype)


def read(buffer_BT: jax.Array) -> jax.Array:
    """Returns the rows of a buffer that `zeros` made, in the dtype that it was given."""
    if buffer_BT.dtype != jnp.uint16:
        return buffer_BT
    return jax.lax.bitcast_convert_type(buffer_BT, jnp.bfloat16)


def differentiable(cache: Cache) -> Cache:
    """Returns the same cache with rows in their dtype, through which gradients flow."""
    return dataclasses.replace(cache, rows=jax.tree.map(read, cache.rows))


def write(buffer_BT: jax.Array, rows_BN: jax.Array, starts_B: jax.Array) -> jax.Array:
    """Returns `buffer_BT` [B, T, ...] with `rows_BN` [B, N, ...] in slots [start, start + N) of
    each sequence.

    Floats are written into a uint16 buffer as the bits of bfloat16 (`zeros`).
    """
    if buffer_BT.dtype == jnp.uint16 and jnp.issubdtype(rows_BN.dtype, jnp.floating):
        rows_BN = jax.lax.bitcast_convert_type(rows_BN.astype(jnp.bfloat16), jnp.uint16)
    rows_BN = rows_BN.astype(buffer_BT.dtype)

    def write_one(buffer, rows, start):
        return jax.lax.dynamic_update_slice_in_dim(buffer, rows, start, axis=0)

    def write_with_neighbour(buffer, rows, start):
        first = jnp.clip(start, 0, len(buffer) - 2)
        two = jax.lax.dynamic_slice_in_dim(buffer, first, 2, axis=0)
        return write_one(buffer, write_one(two, rows, start - first), first)

    if len(buffer_BT) == 1 and not backend.on_cpu():
        # `vmap` makes it a scatter, which takes two kernels on a GPU.
        return jax.lax.dynamic_update_slice_in_dim(buffer_BT, rows_BN, starts_B[0], axis=1)
    # On a CPU, XLA moves the write of a single row after a reshape of the buffer, and keeps a copy
    # of each shape; a write of two rows stays in place.
    alone = backend.on_cpu() and rows_BN.shape[:2] == (1, 1) and buffer_BT.shape[1] > 1
    return jax.vmap(write_with_neighbour if alone else write_one)(buffer_BT, rows_BN, starts_B)


def append(rows: Any, new: tuple, starts_B: Any) -> tuple[tuple, Any]:
    """Appends new rows to the buffers of a layer.

    Args:
      rows: tuple of buffers that `zeros` made; None for a call without a cache.
      new: tuple of new rows [B, N, ...], one for each buffer.
      starts_B: the first slot of the new rows in each sequence.

    Returns:
      The contents of the buffers (`new` without a cache), and the written buffers.
    """
    if rows is None:
        return new, None
    rows = tuple(write(buffer, part, starts_B) for buffer, part in zip(rows, new, strict=True))
    return tuple(map(read, rows)), rows


def mask_and_starts(
    cache: Cache | None, visible_BxNxM: jax.Array, pending: int, window: int = 0
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the mask over slots [B, N, T] and the first slot of new tokens [B].

    Without a cache, the mask is over the new tokens, and the slots are None. With a `window`, a new
    token sees only that many of the tokens that it would see, the last ones: itself and those
    nearest to it in the sequence or on its path in the tree.
    """
    if cache is None:
        return _last(visible_BxNxM, window), None
    capacity = jax.tree.leaves(cache.rows)[0].shape[1]
    mask_BxNxT = visible_slots(visible_BxNxM, cache.lengths, capacity, window)
    return mask_BxNxT, cache.lengths + pending


def visible_slots(
    visible_BxNxM: jax.Array, lengths_B: jax.Array, capacity: int, window: int = 0
) -> jax.Array:
    """Returns a mask over slots, bool [B, N, T], of the visibility among pending and new tokens.

    Args:
      visible_BxNxM: bool; entry (i, j) says that new token i sees token j, where j counts pending
        tokens first, then new ones.
      lengths_B: number of committed slots, which are always visible.
      capacity: T.
      window: as in `mask_and_starts`.
    """
    M = visible_BxNxM.shape[-1]
    offset_BxT = jnp.arange(capacity) - lengths_B[:, None]
    pending_BxNxT = jnp.take_along_axis(
        _last(visible_BxNxM, window), jnp.clip(offset_BxT, 0, M - 1)[:, None, :], axis=-1
    )
    committed: bool | jax.Array = True
    if 0 < window < capacity:
        # The last committed token has offset -1 and comes before all visible pending ones.
        nearer_BxN = jnp.sum(visible_BxNxM, axis=-1)
        committed = offset_BxT[:, None, :] >= nearer_BxN[..., None] - window
    within_BxT = offset_BxT < M
    return jnp.where(offset_BxT[:, None, :] < 0, committed, pending_BxNxT & within_BxT[:, None, :])


def _last(visible_BxNxM: jax.Array, window: int) -> jax.Array:
    """Returns a mask of the last `window` visible tokens of each row; 0 for all.

    Tokens come after their ancestors, so the order in memory is that of the sequence.
    """
    if not 0 < window < visible_BxNxM.shape[-1]:
        return visible_BxNxM
    count_BxNxM = jnp.cumsum(visible_BxNxM, axis=-1)
    return visible_BxNxM & (count_BxNxM > count_BxNxM[..., -1:] - window)


def keep(cache: Cache, path_BxD: jax.Array, lengths_B: jax.Array, in_place: int = 0) -> Cache:
    """Commits pending rows.

    Args:
      cache: has pending rows after its committed ones.
      path_BxD: int32, the pending index of each row to keep, in order; entries past the new length
        are ignored.
      lengths_B: the new lengths, at most `in_place + D` above the old ones.
      in_place: static number of leading pending rows that are in place already.

    Returns:
      The cache with these rows in the slots right after the old lengths and the rows in place.
    """
    if not path_BxD.shape[1]:
        return dataclasses.replace(cache, lengths=lengths_B)

    def gather_one(buffer, length, path):
        return buffer.at[length + path].get(mode="clip")

    buffers, structure = jax.tree.flatten(cache.rows)
    kept = [jax.vmap(gather_one)(buffer_BT, cache.lengths, path_BxD) for buffer_BT in buffers]
    if not backend.on_cpu() and len({(rows.shape, rows.dtype) for rows in kept}) == 1:
        # One kernel on a GPU for all layers instead of one each.
        kept = list(jax.lax.optimization_barrier(jnp.stack(kept)))
    written = [write(*both, cache.lengths + in_place) for both in zip(buffers, kept, strict=True)]
    return Cache(jax.tree.unflatten(structure, written), lengths_B)
