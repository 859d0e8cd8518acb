"""The record of a run: metrics.jsonl and the loss curve."""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from spectr_jax.files import write_whole


class MetricsLog:
    """Appends JSON lines to `path`; on a restart, drops the lines of steps that will be taken again."""

    def __init__(self, path: pathlib.Path, first_step: int):
        self._path = path
        if path.exists():
            kept = [record for record in read_metrics(path) if record["step"] <= first_step]
            write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


class Window:
    """The steps since the last record and the time that they took, evaluation and checkpoints left out."""

    def __init__(self):
        self.metrics: list[dict[str, jax.Array]] = []
        self.clear()

    def add(self, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of one step, as `train_step` returns them; does not wait for the device."""
        self.metrics.append(metrics)

    def clear(self) -> None:
        """Begins anew."""
        self.metrics = []
        self._started, self._aside, self._waited = time.monotonic(), 0.0, 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time inside as waited for the input pipeline."""
        started = time.monotonic()
        yield
        self._waited += time.monotonic() - started

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leaves the time inside out."""
        jax.block_until_ready(self.metrics[-1:])  # The steps until now are no part of it.
        started = time.monotonic()
        yield
        self._aside += time.monotonic() - started

    def means(self) -> dict[str, Any]:
        """Means over the tokens of the window, with tokens per second and the share of the time waited for data."""
        rows = jax.device_get(self.metrics)
        seconds = time.monotonic() - self._started - self._aside
        tokens = np.array([row["tokens"] for row in rows], np.float64)
        losses = [name for name in ("loss", "exit_loss") if name in rows[0]]
        return {
            **{name: float(np.average([row[name] for row in rows], weights=tokens)) for name in losses},
            "grad_norm": float(rows[-1]["grad_norm"]),
            "tokens_per_second": round(float(tokens.sum()) / seconds, 1),
            "waiting_for_data": round(self._waited / seconds, 4),
            "tokens": int(tokens.sum()),
        }


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that a crash cut short is left out."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def plot_curves(metrics: pathlib.Path, path: pathlib.Path) -> None:
    """Draws training and held-out loss against steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_metrics(metrics)
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for name, label, marker in (("loss", "training", None), ("eval_nats_per_token", "held out", "o")):
        points = [(record["step"], record[name]) for record in records if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3)
    axes.set(xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
