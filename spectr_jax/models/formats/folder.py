"""A model folder as Hugging Face's libraries write it: config.json, and safetensors in one file or in parts."""

import json
import os
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from spectr_jax.errors import UserError
from spectr_jax.files import write_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Folder:
    """The tensors of a folder by name, each read when it is asked for."""

    def __init__(self, path: pathlib.Path):
        """Finds the files; raises `UserError` if they are not there, or cannot be read."""
        self.path = path
        try:
            self._open = {file: safetensors.safe_open(path / file, framework="flax") for file in self._files()}
            self._places = {name: file for file, opened in self._open.items() for name in opened.keys()}  # noqa: SIM118
        except UserError:
            raise
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise self._damaged(error) from error

    def _files(self) -> list[str]:
        if (self.path / INDEX).exists():
            index = json.loads((self.path / INDEX).read_text())
            names = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
                raise UserError(f"{str(self.path / INDEX)!r} has no weight_map of tensors to files; save or fetch it again")
            return sorted(set(names.values()))
        if (self.path / WEIGHTS).exists():
            return [WEIGHTS]
        raise UserError(f"{str(self.path)!r} has no {WEIGHTS}; write it with save_pretrained(..., safe_serialization=True)")

    def _damaged(self, error: Exception) -> UserError:
        return UserError(f"{str(self.path)!r} has weights that cannot be read ({error}); save or fetch it again")

    def __iter__(self):
        return iter(self._places)

    def __getitem__(self, name: str) -> jax.Array:
        """A tensor in the dtype of its file; raises KeyError if there is none."""
        try:
            return self._open[self._places[name]].get_tensor(name)
        except safetensors.SafetensorError as error:
            raise self._damaged(error) from error


def read_json(folder: pathlib.Path) -> dict[str, Any]:
    """What config.json gives; raises `UserError` if it is not there or damaged."""
    try:
        given = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{str(folder)!r} is no folder of a Hugging Face model ({error}); fix the path") from error
    if not isinstance(given, dict):
        raise UserError(f"{str(folder / 'config.json')!r} holds {given!r:.40}, not a JSON object; save or fetch it again")
    return {name: value for name, value in given.items() if value is not None}


def save(folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors, each whole or not at all; `folder` is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / WEIGHTS
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    safetensors.numpy.save_file(tensors, partial, {"format": "pt"})  # transformers reads no other format.
    partial.chmod(0o644)  # The library leaves it to the owner alone.
    partial.replace(path)
    write_json(folder / "config.json", config)


def check_sizes(folder: pathlib.Path, config: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raises `UserError` for a size that is no positive integer; what is missing is found when it is read."""
    for name in names:
        if (size := config.get(name)) is not None and (type(size) is not int or size < 1):
            refuse(folder, config, name, "a positive integer")


def refuse(folder: pathlib.Path, config: dict[str, Any], name: str, wanted: str):
    """Raises `UserError` for a field of config.json."""
    raise UserError(f"{str(folder)!r} has {name}={config[name]!r}, which is not {wanted}; fix its config.json")
