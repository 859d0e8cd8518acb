"""Finds the tensors of a file that PyTorch wrote (pytorch_model.bin), without PyTorch.

The file is a zip archive that is not compressed: a pickle, which describes the tensors, and the
bytes of each storage. Of the objects that a pickle can name, only tensors and dictionaries are made,
so no code of the file runs.
"""

import collections
import io
import pathlib
import pickle
import zipfile
from typing import Any, NamedTuple

import numpy as np

from spectr_jax.models.formats.tensors import Location
from spectr_jax.utils.files import check_fetched

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "BoolStorage": "BOOL",
}
"""Dtypes of storages, by safetensors' names."""


class _Storage(NamedTuple):
    dtype: str
    first: int  # Its first byte in the file.


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # Of its first element.
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Unpickler(pickle._Unpickler):
    """Makes dictionaries of `_Tensor`, and raises `UnpicklingError` for all other objects.

    The form in Python: that in C allocates as much memory as a damaged file names.
    """

    def __init__(self, file: io.BytesIO, starts: dict[str, int]):
        super().__init__(file)
        self.starts = starts

    def find_class(self, module: str, name: str) -> Any:
        made = {
            "collections.OrderedDict": collections.OrderedDict,
            "torch._utils._rebuild_tensor_v2": lambda *given: _Tensor(*given[:4]),
            "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
        } | {f"torch.{storage}": dtype for storage, dtype in STORAGES.items()}
        if (full := f"{module}.{name}") not in made:
            raise pickle.UnpicklingError(f"{full} is neither a tensor nor a dictionary")
        return made[full]

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, *_ = pid
        return _Storage(dtype, self.starts[key])


def locations_of(file: pathlib.Path) -> dict[str, Location]:
    """Returns the tensors of a file by name.

    Raises:
      ValueError: it is damaged, has other objects than tensors, or was written by PyTorch 1.5 or
        older.
    """
    check_fetched(file)
    try:
        with zipfile.ZipFile(file) as archive, file.open("rb") as opened:
            starts = {}
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("it is compressed")
                opened.seek(entry.header_offset + 26)  # The lengths of the name and of padding.
                lengths = np.frombuffer(opened.read(4), "<u2")
                starts[entry.filename.rpartition("/")[2]] = opened.tell() + int(lengths.sum())
            if any(entry.flag_bits & 1 for entry in archive.infolist()):
                raise ValueError("it is encrypted")
            [listing] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            found = _Unpickler(io.BytesIO(archive.read(listing)), starts).load()
        return {name: _location(file, tensor) for name, tensor in found.items()}
    except (pickle.UnpicklingError, zipfile.BadZipFile, *_MALFORMED) as error:
        raise ValueError(str(error) or type(error).__name__) from error


_MALFORMED = (
    *(AttributeError, EOFError, IndexError, KeyError, TypeError, RuntimeError, OverflowError),
)
"""What reading a malformed pickle can raise."""


def _location(file: pathlib.Path, tensor: _Tensor) -> Location:
    dtype, shape = tensor.storage.dtype, tuple(tensor.shape)
    dense = tuple(np.cumprod((1, *shape[:0:-1]))[::-1].tolist()) if shape else ()
    both = zip(shape, tensor.strides, dense, strict=True)
    if any(size > 1 and stride != wanted for size, stride, wanted in both):
        raise ValueError(f"a tensor of shape {list(shape)} has strides {list(tensor.strides)}")
    size = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BOOL": 1}.get(dtype, 2)
    return file, tensor.storage.first + tensor.offset * size, dtype, shape
