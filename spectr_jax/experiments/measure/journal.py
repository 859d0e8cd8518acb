"""The journal of a table: measurements saved as they are made, so that a stopped run resumes."""

import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import ml_collections
import numpy as np

from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.finished import check_table
from spectr_jax.experiments.measure.measurement import Measurement
from spectr_jax.utils import hosts
from spectr_jax.utils.config import config_hash, to_json
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import lines_of, lock, parse_json, read_text, write_whole


class Journal:
    """Values by name, in `workdir`/NAME.part.jsonl until the table is written.

    Every process reads the file when it starts; only the first one writes. An incomplete last line
    is ignored.

    Args:
      workdir: folder of the table.
      name: name of the table.
      config: config of the table.
      weights: the weights that are measured (`report.weights`).
      inputs: a digest of the prompts, questions or sentences; "" if there are none.
      again: whether to measure a finished table again. The table stays until the new one is whole.

    Raises:
      Finished: unless `again`, if the table is finished (`check_table`).
      UserError: the table or the file belongs to another config, other weights, other inputs, or
        other hardware, whose times are not comparable.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        name: str,
        config: ml_collections.ConfigDict,
        weights: Sequence[str],
        again: bool = False,
        inputs: str = "",
    ):
        check_table(config, workdir, name, weights, again, inputs)
        self._workdir, self._name, self._config = workdir, name, config
        self._path = workdir / f"{name}.part.jsonl"
        self._weights, self._values = list(weights), dict[str, Any]()
        self._inputs = {"inputs": inputs} if inputs else {}
        provenance = report.provenance()
        self._commit, self._commits = provenance["commit"], list[str]()
        self._started = time.monotonic()
        head = {"config_hash": config_hash(config), "weights": self._weights}
        head |= {"hardware": provenance["hardware"], **self._inputs}
        self._lock = self._locked() if hosts.is_first() else None
        lines = [] if self._is_of_the_finished_table() else self._read()
        if lines and lines[0] != head:
            raise UserError(
                f"{str(self._path)!r}: belongs to a table of another config, other weights, other "
                f"inputs, other hardware or an older version ({lines[0]}, this run: {head}); finish "
                "that table, choose a new --workdir, or remove the file"
            )
        for line in lines[1:]:
            if "commit" in line:
                self._commits.append(line["commit"])
            else:
                self._values[line["name"]] = line["value"]
                self._started -= line["seconds"]
        hosts.wait_for_all("the journal is read")
        if not lines:
            self._write(head, mode="w")  # This overwrites an incomplete first line.
        if self._commit not in self._commits:
            self._commits.append(self._commit)
            self._write({"commit": self._commit})

    def about(self) -> dict[str, Any]:
        """Returns the table's provenance: its config and weights, `report.provenance`, and the
        seconds and commits of all starts."""
        return {
            "seconds": round(time.monotonic() - self._started, 1),
            "config": to_json(self._config),
            "config_hash": config_hash(self._config),
            **report.provenance(),
            "commit": self._commit,
            "commits": self._commits,
            "weights": self._weights,
            **self._inputs,
        }

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get_or_measure(self, name: str, measure: Callable[[], Any]) -> Any:
        """Returns the JSON value stored as `name`; if there is none, stores that of `measure`."""
        if name not in self._values:
            started = time.monotonic()
            value = self._values[name] = measure()
            seconds = round(time.monotonic() - started, 3)
            self._write({"name": name, "value": value, "seconds": seconds})
        return self._values[name]

    def measurement(self, name: str, measure: Callable[[], Measurement]) -> Measurement:
        """Returns the measurement stored as `name`; if there is none, stores that of `measure`."""

        def as_json() -> dict[str, Any]:
            totals = measure()
            lists = {key: np.asarray(array).tolist() for key, array in totals.observed.items()}
            return totals._replace(observed=lists)._asdict()

        totals = Measurement(**self.get_or_measure(name, as_json))
        arrays = {key: np.asarray(values) for key, values in totals.observed.items()}
        return totals._replace(observed=arrays)

    def finish(
        self,
        result: dict[str, Any],
        markdown: Callable[[dict[str, Any]], str],
        plot: Callable[[dict[str, Any], pathlib.Path], None] | None = None,
    ) -> dict[str, Any]:
        """Writes the table as JSON, Markdown and PNG, and removes the journal. Returns `result`
        with the fields of `about`."""
        result = {**result, **self.about()}
        if hosts.is_first():
            if plot is not None:  # First, because the JSON says that the table is finished.
                plot(result, self._workdir / f"{self._name}.png")
            report.write(self._workdir, self._name, result, markdown(result))
            self._path.unlink(missing_ok=True)
            (self._workdir / f".{self._name}.lock").unlink(missing_ok=True)
        return result

    def _locked(self) -> TextIO:
        """Returns an open file whose lock other processes see. The lock ends with this process."""
        self._workdir.mkdir(parents=True, exist_ok=True)
        file = (self._workdir / f".{self._name}.lock").open("w")
        place = f"workdir={str(self._workdir)!r}"
        lock(file, f"{place}: another process makes this table; wait, or choose another")
        return file

    def _write(self, line: dict[str, Any], mode: str = "a") -> None:
        if hosts.is_first():
            with self._path.open(mode) as file:
                file.write(json.dumps(line) + "\n")

    def _is_of_the_finished_table(self) -> bool:
        """Returns whether the file is left from the table in the workdir: a run was killed after it
        wrote the table."""
        table = self._path.with_name(f"{self._name}.json")
        there = self._path.exists() and table.exists()
        older = there and self._path.stat().st_mtime < table.stat().st_mtime
        return hosts.gather(older)[0]

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        try:
            whole, _, _ = read_text(self._path).rpartition("\n")
            lines = [parse_json(line) for line in lines_of(whole)] if whole else []
        except ValueError as error:
            raise UserError(
                f"{str(self._path)!r}: is damaged ({error}); remove it to start again"
            ) from error
        if hosts.is_first() and lines:
            write_whole(self._path, whole + "\n")  # Drops an incomplete last line.
        return lines
