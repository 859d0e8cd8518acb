"""The record of a run: metrics.jsonl and the loss curve."""

import json
import pathlib
from typing import Any

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
