"""A model folder as Hugging Face's libraries write it: config.json, and safetensors in one file or
in parts."""

import json
import pathlib
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from spectr_jax.models.weights import write_tensors
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import check_fetched, write_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": jnp.float64, "F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}
"""Dtypes that are read, by safetensors' names."""


class Place(NamedTuple):
    """Where a tensor is: its file, its first byte there, its dtype and shape."""

    file: pathlib.Path
    start: int
    dtype: str
    shape: tuple[int, ...]


class Folder:
    """The tensors of a folder by name, each read when it is asked for, without the library's map of
    the whole file."""

    def __init__(self, path: pathlib.Path):
        """Finds the files; raises `UserError` if they are not there, or cannot be read."""
        self.path = path
        self._unread: set[str] = set()
        try:
            self._places = {
                name: place
                for file in self._files()
                for name, place in _places(path / file).items()
            }
        except UserError:
            raise
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise self._damaged(error) from error
        self._unread.update(self._places)

    def check_all_read(self, unused: str) -> None:
        """Raises `UserError` for a tensor that was not read and whose name does not match the
        pattern `unused`: a model that has it is another than config.json says."""
        left = sorted(name for name in self._unread if not re.fullmatch(unused, name))
        if left:
            raise UserError(
                f"{str(self.path)!r} has {left[0]}, which its config.json does not mention "
                f"({len(left)} such tensors); fix "
                "its config.json, or give another model"
            )

    def _files(self) -> list[str]:
        if (self.path / WEIGHTS).exists():  # As transformers, whatever index is beside it.
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
                f"{str(self.path / INDEX)!r} has no weight_map of tensors to files; save or fetch "
                "it again"
            )
        return sorted(set(names.values()))

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"{str(self.path)!r} has weights that cannot be read ({error}); save or fetch it again"
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
            raise UserError(
                f"{str(file)!r} has {name} in {dtype}, which is not read; give another model"
            )
        try:
            count = int(np.prod(shape))
            values = np.fromfile(
                file, np.uint8, count * np.dtype(DTYPES[dtype]).itemsize, offset=start
            )
            return values.view(DTYPES[dtype]).reshape(shape)
        except (OSError, ValueError) as error:
            raise self._damaged(error) from error


def _places(file: pathlib.Path) -> dict[str, Place]:
    """Returns where each tensor of a safetensors file is; raises what the library raises for one
    that is damaged."""
    check_fetched(file)
    with safetensors.safe_open(file, framework="numpy"), file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {
        name: Place(
            file, 8 + length + given["data_offsets"][0], given["dtype"], tuple(given["shape"])
        )
        for name, given in header.items()
        if name != "__metadata__"
    }


def read_json(folder: pathlib.Path, nulls: bool = False) -> dict[str, Any]:
    """Returns what config.json gives, with or without what is null; raises `UserError` if it is not
    there or damaged."""
    try:
        given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{str(folder)!r} is not a Hugging Face model folder ({error}); fix the path"
        ) from error
    if not isinstance(given, dict):
        raise UserError(
            f"{str(folder / 'config.json')!r} holds {given!r:.40}, not a JSON object; save or "
            "fetch it again"
        )
    return {name: value for name, value in given.items() if nulls or value is not None}


def save(folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors, each whole or not at all; `folder` is made if it is
    not there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(
        folder / WEIGHTS, tensors, {"format": "pt"}
    )  # transformers reads no other format.
    write_json(folder / "config.json", config)


def check_sizes(folder: pathlib.Path, config: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raises `UserError` for a size that is not a positive integer; what is missing is found when it
    is read."""
    for name in names:
        if (size := config.get(name)) is not None and (type(size) is not int or size < 1):
            refuse(folder, config, name, "a positive integer")


def refuse(folder: pathlib.Path, config: dict[str, Any], name: str, wanted: str):
    """Raises `UserError` for a field of config.json."""
    raise UserError(
        f"{str(folder)!r} has {name}={config[name]!r}, which is not {wanted}; fix its config.json"
    )
