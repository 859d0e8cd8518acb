"""Hugging Face model folders: config.json, and safetensors in one file or in parts."""

import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors

from spectr_jax.models.weights import write_tensors
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import check_fetched, write_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
"""Dtypes that are read, by safetensors' names."""
KINDS: dict[str, Callable[[Any], bool]] = {
    "a positive integer": lambda value: type(value) is int and value >= 1,
    "a positive number": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "a non-negative number": lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    "true or false": lambda value: type(value) is bool,
}
"""Checks of metadata, by the words for them in errors."""


Place = tuple[pathlib.Path, int, str, tuple[int, ...]]
"""Location of a tensor: its file, its first byte there, its dtype and shape."""


class Folder:
    """The tensors of a folder by name. Each access reads one, and maps no file into memory."""

    def __init__(self, path: pathlib.Path):
        """Finds the tensors; raises `UserError` if a file is missing or cannot be read."""
        self.path = path
        self._places: dict[str, Place] = {}
        try:
            for file in self._files():
                self._places |= _places(path / file)
        except UserError:
            raise
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise self._damaged(error) from error
        self._unread = set(self._places)

    def check_all_read(self, unused: str) -> None:
        """Raises `UserError` for a tensor that was not read and does not match `unused`.

        A model with such a tensor differs from its config.json.
        """
        left = sorted(name for name in self._unread if not re.fullmatch(unused, name))
        if left:
            raise UserError(
                f"{str(self.path)!r} has {left[0]}, which its config.json does not mention "
                f"({len(left)} such tensors); fix config.json, or give another model"
            )

    def _files(self) -> list[str]:
        if (self.path / WEIGHTS).exists():  # As in transformers, even if there is an index.
            return [WEIGHTS]
        if not (self.path / INDEX).exists():
            raise UserError(
                f"{str(self.path)!r} has no {WEIGHTS}; write it with save_pretrained(..., "
                "safe_serialization=True)"
            )
        index = json.loads((self.path / INDEX).read_text(encoding="utf-8"))
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise UserError(
                f"{str(self.path / INDEX)!r} has no weight_map of tensors to files; fetch it again"
            )
        return sorted(set(names.values()))

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"{str(self.path)!r} has weights that cannot be read ({error}); fetch it again"
        )

    def __iter__(self):
        return iter(self._places)

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor in the dtype of its file.

        Raises:
          KeyError: there is none.
          UserError: it cannot be read.
        """
        file, start, dtype, shape = self._places[name]
        self._unread.discard(name)
        if dtype not in DTYPES:
            raise UserError(f"{str(file)!r} has {name} in {dtype}, which is not supported")
        size = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
        try:
            values = np.fromfile(file, np.uint8, size, offset=start)
            return values.view(DTYPES[dtype]).reshape(shape)
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error


def _places(file: pathlib.Path) -> dict[str, Place]:
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


def read_json(folder: pathlib.Path, nulls: bool = False) -> dict[str, Any]:
    """Returns the fields of config.json, without those that are null unless `nulls`.

    Raises:
      UserError: the file is missing or damaged.
    """
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(folder)!r} is not a Hugging Face model folder ({error}); fix the path"
        ) from error
    if not isinstance(given, dict):
        raise UserError(
            f"{str(folder / 'config.json')!r} holds {given!r:.40}, not a JSON object; fetch it again"
        )
    return {name: value for name, value in given.items() if nulls or value is not None}


def save(folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors, each atomically; makes `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    # transformers reads no other format than "pt".
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / "config.json", config)


def check_fields(
    folder: pathlib.Path, config: dict[str, Any], kinds: dict[str, tuple[str, ...]]
) -> None:
    """Raises `UserError` for a field that is not of its kind, {key of `KINDS`: fields}.

    Missing fields are found when they are read.
    """
    for kind, names in kinds.items():
        for name in names:
            if config.get(name) is not None and not KINDS[kind](config[name]):
                refuse(folder, config, name, kind)


def refuse(folder: pathlib.Path, config: dict[str, Any], name: str, wanted: str):
    """Raises `UserError` for a field of config.json."""
    raise UserError(
        f"{str(folder)!r} has {name}={config[name]!r}, which is not {wanted}; fix its config.json"
    )
