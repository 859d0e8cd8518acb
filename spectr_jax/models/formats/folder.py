"""Hugging Face model folders: config.json, and weights in one file or safetensors in parts."""

import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors

from spectr_jax.models.formats import pickled
from spectr_jax.models.formats.tensors import FLOATS, Location, Unread, locations_of, unread
from spectr_jax.models.formats.weights import write_tensors
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import read_json, write_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
KINDS: dict[str, Callable[[Any], bool]] = {
    "a positive integer": lambda value: type(value) is int and value >= 1,
    "a positive number": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "a non-negative number": lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    "true or false": lambda value: type(value) is bool,
}
"""Checks of a field's value, by what errors call such values."""


class Folder:
    """The tensors of a folder by name."""

    def __init__(self, path: pathlib.Path):
        """Finds the tensors; raises `UserError` if a file is missing or cannot be read."""
        self.path = path
        self._places: dict[str, Location] = {}
        try:
            index = self._index()
            alone = WEIGHTS if (path / WEIGHTS).exists() else PICKLED
            for file in sorted(set(index.values())) or [alone]:
                found = (pickled.locations_of if file == PICKLED else locations_of)(path / file)
                # The index decides which of several files has a tensor.
                here = [name for name in found if index.get(name, file) == file]
                if twice := sorted(self._places.keys() & here):
                    raise self._contradicts(f"does not place {twice[0]}, which two files have")
                self._places |= {name: found[name] for name in here}
        except UserError:
            raise
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise self._damaged(error) from error
        if lacking := sorted(index.keys() - self._places.keys()):
            name, file = lacking[0], index[lacking[0]]
            raise self._contradicts(f"places {name} in {file!r}, which lacks it")
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

    def _contradicts(self, problem: str) -> UserError:
        return UserError(f"{str(self.path / INDEX)!r} {problem}; fetch the model again")

    def _index(self) -> dict[str, str]:
        """Returns the file of each tensor; empty if one file has all of them."""
        if (self.path / WEIGHTS).exists():  # As in transformers, even if there is an index.
            return {}
        if not (self.path / INDEX).exists():
            if (self.path / PICKLED).exists():
                return {}
            raise UserError(
                f"{str(self.path)!r} has no {WEIGHTS}; write it with save_pretrained(..., "
                "safe_serialization=True)"
            )
        names = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
            raise UserError(
                f"{str(self.path / INDEX)!r} has no weight_map of tensors to files; fetch it again"
            )
        return names

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"{str(self.path)!r} has weights that cannot be read ({error}); fetch it again"
        )

    def __iter__(self):
        return iter(self._places)

    def __getitem__(self, name: str) -> np.ndarray:
        """Returns a tensor in the dtype of its file; raises as `unread` and its rows."""
        tensor = self.unread(name)
        return tensor[:].reshape(tensor.shape)

    def unread(self, name: str, dtypes: dict[str, Any] = FLOATS) -> Unread:
        """Returns a tensor in the dtype of its file. Its rows raise `UserError` if it is damaged.

        Args:
          name: of the tensor.
          dtypes: those that it may have, by safetensors' names.

        Raises:
          KeyError: there is none.
          UserError: it has a dtype that is not read.
        """
        file, _, dtype, shape = place = self._places[name]
        self._unread.discard(name)
        if dtype not in dtypes:
            raise UserError(
                f"{str(file)!r} has {name} in {dtype}; give a model in {', '.join(dtypes)}"
            )
        tensor = unread(place)

        def rows(start: int, stop: int) -> np.ndarray:
            try:
                return tensor.read(start, stop)
            except (OSError, ValueError) as error:
                raise self._damaged(error) from error

        return Unread(shape, rows)


def save(folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors, each atomically; makes `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    # transformers reads no other format than "pt".
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / "config.json", config)


def check_fields(
    source: str, config: Any, kinds: dict[str, tuple[str, ...]], prefix: str = ""
) -> None:
    """Raises `UserError` for a value that is not of its kind.

    Missing and null fields are not checked.

    Args:
      source: the model, named in errors.
      config: has `get`, as a dict.
      kinds: names of fields by kind, a key of `KINDS`.
      prefix: precedes the names.
    """
    for kind, names in kinds.items():
        for name in names:
            if (value := config.get(prefix + name)) is not None and not KINDS[kind](value):
                raise refused(source, prefix + name, value, kind)


def check_known(
    source: str, config: Any, known: dict[str, tuple[Any, ...]], prefix: str = ""
) -> None:
    """Raises `UserError` for a value that is not one of the `known` values of its field.

    A missing field has the first of them. The other arguments are those of `check_fields`.
    """
    for name, values in known.items():
        if (value := config.get(prefix + name, values[0])) not in values:
            wanted = " or ".join(map(repr, values))
            raise refused(source, prefix + name, value, wanted, "give another model")


def refused(
    source: str,
    name: str,
    value: Any,
    wanted: str,
    remedy: str = "give another model, or correct a wrong value",
) -> UserError:
    """Returns the error for a value in the configuration of a model."""
    return UserError(f"{source!r} has {name}={value!r:.60}: must be {wanted}; {remedy}")
