"""GGUF files: their metadata, and their tensors in any quantisation that the library `gguf` reads."""

import math
import pathlib
from typing import Any

import gguf
import numpy as np

from spectr_jax.models.formats.tensors import Unread
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import check_fetched


class _Reader(gguf.GGUFReader):
    """A reader that opens a file with a large vocabulary six times as fast.

    Its views are plain arrays, not memory maps, and it reads a list in one pass; the library makes
    two views of each of 100,000 tokens and merges.
    """

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
        """Returns the bytes of a value, its parts, the indices of the parts with data, and types."""
        array = gguf.GGUFValueType.ARRAY
        if raw_type != array or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        (kind,), (count,) = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, start = gguf.GGUFValueType(kind), orig_offs + 12
        if item == array:
            return super()._get_field_parts(orig_offs, raw_type)
        if item == gguf.GGUFValueType.STRING:
            values: list[Any] = _strings(memoryview(self._data.data), start, int(count))
            size = sum(value.nbytes for value in values) + 8 * len(values)
        else:
            values = [self._get(start, self.gguf_scalar_to_np[item], count)]
            size = values[0].nbytes
        return 12 + size, values, list(range(len(values))), [array, item]


def _strings(data: memoryview, start: int, count: int) -> list[memoryview]:
    """Returns `count` strings, each after its length in eight bytes; raises ValueError if `data`
    ends before them."""
    found = []
    for _ in range(count):
        end = start + 8 + int.from_bytes(data[start : start + 8], "little")
        if len(data) < max(end, start + 8):
            raise ValueError("its list of strings is cut")
        found.append(data[start + 8 : end])
        start = end
    return found


class GGUF:
    """An open GGUF file: its metadata, and its tensors, each read on access."""

    def __init__(self, path: pathlib.Path):
        """Opens `path`; raises `UserError` unless it is a complete GGUF file."""
        self.path = path
        try:
            check_fetched(path)
            with path.open("rb") as file:
                magic, version = file.read(4), file.read(4)
            # Numbers in a list of a big-endian file would be read wrong.
            if magic == b"GGUF" and version[:2] == b"\0\0":
                raise UserError(
                    f"{str(path)!r} is a big-endian GGUF file; convert it with: python -m "
                    "gguf.scripts.gguf_convert_endian FILE little"
                )
            reader = _Reader(path)
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._fields = reader.fields
            self._unread = set(self.tensors)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise UserError(
                f"{str(path)!r} is not a GGUF file that can be read ({error}); fetch it again"
            ) from error

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of the metadata; raises `UserError` if it is damaged."""
        field = self._fields.get(name)
        try:
            return default if field is None else field.contents()
        except (ValueError, IndexError) as error:
            raise UserError(
                f"{str(self.path)!r} has a damaged {name!r} in its metadata ({error}); fetch it again"
            ) from error

    def need(self, name: str) -> Any:
        """Returns a value of the metadata; raises `UserError` if there is none."""
        if name not in self._fields:
            raise UserError(f"{str(self.path)!r} lacks {name!r} in its metadata; fetch it again")
        return self.get(name)

    def check_all_read(self, unused: set[str]) -> None:
        """Raises `UserError` for a tensor that was not read and is not `unused`.

        Nothing else in a file says that a model has such a part.
        """
        if left := self._unread - unused:
            raise UserError(
                f"{str(self.path)!r} has an unsupported part {min(left)!r}; give another"
            )

    def tensor(self, name: str) -> Unread:
        """Returns a tensor in float32. Its rows raise `UserError` if it cannot be dequantised.

        Raises:
          KeyError: there is none.
        """
        found = self.tensors[name]
        self._unread.discard(name)
        kind, shape = found.tensor_type, tuple(map(int, reversed(found.shape)))
        stored = np.atleast_2d(found.data)  # A vector is one row of blocks, and is read whole.

        def rows(start: int, stop: int) -> np.ndarray:
            first, last = (start, stop) if len(shape) > 1 else (0, 1)
            row = math.prod(stored.shape[1:])
            offset = found.data_offset + first * row * stored.itemsize
            try:
                # This bypasses the reader's memory map, whose pages would stay in memory.
                read = np.fromfile(self.path, stored.dtype, (last - first) * row, offset=offset)
                # The library dequantizes 16 rows at a time, which is quicker for long rows.
                of_each = math.gcd((last - first) * math.prod(stored.shape[1:-1]), 16)
                values = gguf.dequantize(read.reshape(-1, of_each * stored.shape[-1]), kind)
                values = np.asarray(values, np.float32).reshape(last - first, *shape[1:] or (-1,))
            except (NotImplementedError, ValueError) as error:
                raise UserError(
                    f"{str(self.path)!r} has {name} in {kind.name}, which cannot be read ({error}); "
                    "give another file"
                ) from error
            return values if len(shape) > 1 else values[0, start:stop]

        return Unread(shape, rows)
