"""The record of a run: metrics.jsonl and the loss curve."""

import contextlib
import json
import pathlib
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import tqdm

from spectr_jax.utils import hosts
from spectr_jax.utils.files import lines_of, parse_json, read_text, write_figure, write_whole

SECONDS_BETWEEN_PLOTS = 10


class Curves(NamedTuple):
    """Two metrics to plot and their label. Of students, the training alpha_1 is over all tokens,
    the held-out one over those after which a draft is requested."""

    training: str
    heldout: str
    label: str


class MetricsLog:
    """Appends JSON lines to metrics.jsonl of a workdir, after removing the lines of steps after
    `first_step`, which a resumed run takes again, and plots `curves` in loss.png.

    Only one process of a run writes.
    """

    def __init__(self, workdir: pathlib.Path, first_step: int, curves: Curves):
        self._path, self._plot = workdir / "metrics.jsonl", workdir / "loss.png"
        self._curves, self._redraw_at = curves, 0.0
        if hosts.is_first() and self._path.exists():
            kept = [record for record in read_metrics(self._path) if record["step"] <= first_step]
            write_whole(self._path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, record: dict[str, Any]) -> None:
        if hosts.is_first():
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def write_scores(self, step: int, scores: dict[str, float], redraw: bool) -> None:
        """Writes and prints held-out scores, and plots the curves. Unless `redraw`, it plots only
        every ten seconds, because that takes a fifth of a second."""
        if not hosts.is_first():
            return
        self.write({"step": step, **scores})
        shown = [f"{name.removeprefix('eval_')} {score:.4g}" for name, score in scores.items()]
        tqdm.tqdm.write(f"step {step}, held out: {', '.join(shown)}")
        if redraw or time.monotonic() > self._redraw_at:
            plot_curves(self._path, self._plot, self._curves)
            self._redraw_at = time.monotonic() + SECONDS_BETWEEN_PLOTS


class Window:
    """The steps since the last line of metrics.jsonl, and their time without evaluation and
    checkpoints.

    It is a context manager; inside it a thread records when the device finishes each step. The
    first step of a run compiles, so it counts in the means but not in the speed.
    """

    def __init__(self):
        self.metrics: list[dict[str, jax.Array]] = []
        self._queue: queue.SimpleQueue[dict[str, jax.Array] | None] = queue.SimpleQueue()
        self._dispatched = self._done = 0
        self._done_at = 0.0
        self._start_clock()

    def __enter__(self) -> "Window":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._queue.put(None)  # Ends the thread.

    def _watch(self) -> None:
        """Counts the steps that the device has finished, and when it finished the last one."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # The run itself reports this error.
            while (metrics := self._queue.get()) is not None:
                jax.block_until_ready(metrics)
                self._done_at = time.monotonic()
                self._done += 1

    def add(self, metrics: dict[str, jax.Array]) -> None:
        """Adds the metrics of one step. Only the first step waits for the device."""
        self.metrics.append(metrics)
        self._dispatched += 1
        self._queue.put(metrics)
        if self._dispatched == 1:
            jax.block_until_ready(metrics)
            self._start_clock()

    def clear(self) -> None:
        """Starts a new window."""
        self.metrics = []
        self._start_clock()

    def _start_clock(self) -> None:
        self._untimed = len(self.metrics)
        self._started, self._aside, self._waited = time.monotonic(), 0.0, 0.0

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """A context whose time counts as waiting for data while the device is idle. Steps are
        dispatched ahead, so the host mostly waits while the device works, at no cost."""
        started = time.monotonic()
        yield
        if self._done == self._dispatched:
            self._waited += time.monotonic() - max(started, self._done_at)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """A context whose time does not count."""
        jax.block_until_ready(self.metrics[-1:])  # The time of steps still under way counts.
        started = time.monotonic()
        yield
        self._aside += time.monotonic() - started

    def means(self) -> dict[str, Any]:
        """Returns means over the tokens of the window, with tokens per second and the share of
        time spent waiting for data, unless the window has only the first step."""
        rows = jax.device_get(self.metrics)
        seconds = time.monotonic() - self._started - self._aside
        tokens = np.array([row["tokens"] for row in rows], np.float64)
        means: dict[str, Any] = {
            name: float(np.average([row[name] for row in rows], weights=tokens))
            for name in rows[0]
            if name not in ("grad_norm", "tokens")
        }
        means["grad_norm"] = float(rows[-1]["grad_norm"])
        if timed := float(tokens[self._untimed :].sum()):
            means["tokens_per_second"] = round(timed / seconds, 1)
            means["waiting_for_data"] = round(self._waited / seconds, 4)
        return {**means, "tokens": int(tokens.sum())}


def read_metrics(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl, or an empty list if there is no file. Lines without a
    step are left out, and so is what follows a line that a crash truncated."""
    records = []
    for line in lines_of(read_text(path)) if path.exists() else ():
        try:
            record = parse_json(line)
        except ValueError:
            break
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def plot_curves(metrics: pathlib.Path, path: pathlib.Path, curves: Curves) -> None:
    """Plots a training metric and a held-out metric against steps."""
    from matplotlib.figure import Figure

    records = read_metrics(metrics)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    lines = ((curves.training, "training", None), (curves.heldout, "held out", "o"))
    for name, label, marker in lines:
        points = [(record["step"], record[name]) for record in records if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, markersize=3)
    axes.set(xlabel="step", ylabel=curves.label)
    axes.grid(alpha=0.3)
    axes.legend()
    write_figure(path, figure)
