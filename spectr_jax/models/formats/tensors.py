"""Arrays of checkpoints that are read on access, as many rows at a time as are wanted."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import check_fetched

FLOATS = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
INTEGERS = {"I32": np.int32, "I64": np.int64}
DTYPES = FLOATS | INTEGERS | {"I8": jnp.int8, "U16": jnp.uint16}
"""Dtypes that are read, by safetensors' names."""

Location = tuple[pathlib.Path, int, str, tuple[int, ...]]
"""Location of a tensor: its file, its first byte there, its dtype and shape."""


@dataclasses.dataclass(frozen=True)
class Unread:
    """An array in a file: `array[start:stop]` reads these rows, and maps no file into memory.

    Attributes:
      shape: its shape.
      read: (start, stop) -> rows [stop - start, ...].
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0] if self.shape else 1)
        return self.read(start, stop)

    def then(self, change: Callable[[np.ndarray], Any]) -> "Unread":
        """Returns this array with `change` applied to the rows that are read."""
        return Unread(self.shape, lambda start, stop: change(self.read(start, stop)))


def locations_of(file: pathlib.Path) -> dict[str, Location]:
    """Returns the tensors of a safetensors file; raises the library's errors if it is damaged."""
    check_fetched(file)
    with safetensors.safe_open(file, framework="numpy"), file.open("rb") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(start - 8))
    header.pop("__metadata__", None)
    return {
        name: (file, start + given["data_offsets"][0], given["dtype"], tuple(given["shape"]))
        for name, given in header.items()
    }


def unread(location: Location) -> Unread:
    """Returns the tensor at `location`. Reading it raises OSError or ValueError if it is damaged."""
    file, first, stored, shape = location
    dtype = np.dtype(DTYPES[stored])
    row = math.prod(shape[1:]) * dtype.itemsize

    def read(start: int, stop: int) -> np.ndarray:
        values = np.fromfile(file, np.uint8, (stop - start) * row, offset=first + start * row)
        return values.view(dtype).reshape(stop - start, *shape[1:])

    return Unread(shape, read)


def rows_of(array: Unread, first: int, count: int) -> Unread:
    """Returns `count` rows of an array from row `first`, or fewer if it ends before."""
    count = max(min(count, array.shape[0] - first), 0)
    shape = (count, *array.shape[1:])
    return Unread(shape, lambda start, stop: array.read(first + start, first + stop))


def joined(parts: Sequence[Unread]) -> Unread:
    """Returns the rows of `parts`, one after another."""
    ends = np.cumsum([part.shape[0] for part in parts]).tolist()

    def read(start: int, stop: int) -> np.ndarray:
        found = []
        for part, end in zip(parts, ends, strict=True):
            before = end - part.shape[0]
            low, high = max(start, before), min(stop, end)
            if low < high:
                found.append(part[low - before : high - before])
        return concatenated(found)

    return Unread((ends[-1], *parts[0].shape[1:]), read)


def in_order(array: Any, order: np.ndarray | None, start: int, stop: int) -> np.ndarray:
    """Returns the rows `order[start:stop]` of an array, read in runs of consecutive rows.

    Args:
      array: an `Unread` or an array of NumPy.
      order: indices of rows; None for their own order.
      start: the first row.
      stop: the row after the last.
    """
    if order is None:
        return array[start:stop]
    rows = order[start:stop]
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return concatenated([array[run[0] : run[-1] + 1] for run in runs])


def concatenated(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays joined along their first axis; one array is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def check_finite(source: str, name: str, array: np.ndarray | jax.Array) -> None:
    """Raises `UserError` if an array of a model has a value that is not finite.

    Args:
      source: the model, named in errors.
      name: the array, named in errors.
      array: of any dtype; integers are finite.
    """
    array = np.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return
    # Bits above those of infinity are NaN. NumPy compares integers faster than it tests floats.
    of_size, infinity = array.dtype.itemsize, np.array([np.inf, -np.inf], array.dtype)
    for sign, kind in enumerate("iu"):
        bits = array.view(f"{kind}{of_size}")
        if bits.max(initial=0) >= infinity.view(f"{kind}{of_size}")[sign]:
            raise UserError(
                f"{source!r}: {name} has values that are not finite; fetch or train the model again"
            )
