"""What a table has measured so far, written to disk at once: a run that was stopped resumes from it."""

import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
import numpy as np

from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.measurement import Measurement
from spectr_jax.utils import hosts
from spectr_jax.utils.config import config_hash
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import write_whole


class Journal:
    """Values by name, in `workdir`/NAME.part.jsonl until the table is there.

    Each process of a run reads it when it starts, and the first one writes; a line that was cut short does not count.

    Args:
      workdir: of the table.
      name: of the table.
      config: of the table.
      weights: that the values are measured with (`report.weights`).

    Raises:
      UserError: the file is of another config, of other weights, or of other hardware, whose times would not compare.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        name: str,
        config: ml_collections.ConfigDict,
        weights: Sequence[str],
    ):
        self._path, self._config = workdir / f"{name}.part.jsonl", config
        made = report.provenance()
        head = {
            "config_hash": config_hash(config),
            "weights": list(weights),
            "hardware": made["hardware"],
        }
        self._weights, self._values = head["weights"], dict[str, Any]()
        self._commit, self._commits = made["commit"], list[str]()
        self._started = time.monotonic()
        lines = self._read()
        if lines and lines[0] != head:
            raise UserError(
                f"{str(self._path)!r} is of a table that was begun with another config, with other weights, on other "
                f"hardware or by an older version ({lines[0]}, here {head}); finish it as it was begun, choose a new "
                "--workdir, or remove it"
            )
        for line in lines[1:]:
            if "commit" in line:
                self._commits.append(line["commit"])
            else:
                self._values[line["name"]] = line["value"]
                self._started -= line["seconds"]
        hosts.wait_for_all("the journal is read")
        if hosts.is_first():
            workdir.mkdir(parents=True, exist_ok=True)
        if not lines:
            self._write(head, mode="w")  # Over a first line that was cut short.
        if self._commit not in self._commits:
            self._commits.append(self._commit)
            self._write({"commit": self._commit})

    def about(self) -> dict[str, Any]:
        """Returns the end of the table: `report.about`, with the time and the commits of earlier starts, and the weights."""
        about = report.about(self._config, self._started)
        return {**about, "commit": self._commit, "commits": self._commits, "weights": self._weights}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str, take: Callable[[], Any]) -> Any:
        """Returns the JSON value stored under `name`; if there is none, the result of `take`, which is stored."""
        if name not in self._values:
            started = time.monotonic()
            self._values[name] = take()
            line = {
                "name": name,
                "value": self._values[name],
                "seconds": round(time.monotonic() - started, 3),
            }
            self._write(line)
        return self._values[name]

    def measurement(self, name: str, take: Callable[[], Measurement]) -> Measurement:
        """As above, for a measurement."""

        def as_json() -> dict[str, Any]:
            taken = take()
            return {
                **taken._asdict(),
                "observed": {
                    key: np.asarray(array).tolist() for key, array in taken.observed.items()
                },
            }

        value = self.value(name, as_json)
        return Measurement(
            **{
                **value,
                "observed": {key: np.asarray(array) for key, array in value["observed"].items()},
            }
        )

    def remove(self) -> None:
        """Removes the journal; call it once the table is written."""
        if hosts.is_first():
            self._path.unlink(missing_ok=True)

    def _write(self, line: dict[str, Any], mode: str = "a") -> None:
        if hosts.is_first():
            with self._path.open(mode) as file:
                file.write(json.dumps(line) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        whole, _, _ = self._path.read_text().rpartition("\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise UserError(
                f"{str(self._path)!r} is damaged ({error}); remove it to begin again"
            ) from error
        if hosts.is_first() and lines:
            write_whole(
                self._path, whole + "\n"
            )  # The next line must not be glued to one that was cut short.
        return lines
