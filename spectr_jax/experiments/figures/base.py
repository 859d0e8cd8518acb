"""A figure of a paper: curves, points, and how they are drawn."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from spectr_jax.experiments.measure import report
from spectr_jax.utils.files import write_figure, write_json


@dataclasses.dataclass(frozen=True)
class Series:
    """A curve or points."""

    label: str  # Legend entry; "" for none.
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None  # Standard error of each point; None for a curve.
    like: str = ""  # Label of the curve whose colour the points take; "" for black.
    marker: str = "o"  # Matplotlib's marker of points.
    panel: int = 0  # Index of the panel.


@dataclasses.dataclass(frozen=True)
class Figure:
    """The content of one figure, with one y label per panel and the scales of x and y."""

    title: str
    caption: str
    xlabel: str
    ylabels: tuple[str, ...]
    series: list[Series]
    scales: tuple[str, str] = ("linear", "linear")


def write(figure: Figure, path: pathlib.Path, **about: Any) -> None:
    """Writes the data to PATH.json, with `about` and the provenance, and the picture to
    PATH.png."""
    shown = dataclasses.asdict(figure)
    for series in shown["series"]:
        series["x"] = list(series["x"])
    plot(figure, path.with_name(f"{path.name}.png"))  # First: the JSON says that it is finished.
    write_json(path.with_name(f"{path.name}.json"), {**shown, **about, **report.provenance()})


def plot(figure: Figure, path: pathlib.Path) -> None:
    """Draws the curves, and the points with bars of two standard errors."""
    from matplotlib import figure as canvases
    from matplotlib import ticker

    panels = len(figure.ylabels)
    canvas = canvases.Figure(figsize=(5.8 * panels, 4.8), layout="constrained")
    axes = canvas.subplots(1, panels, squeeze=False)
    for panel, (ax, ylabel) in enumerate(zip(axes[0], figure.ylabels, strict=True)):
        colours, look = {"": "black"}, dict[str, Any]()
        for series in (each for each in figure.series if each.panel == panel):
            if series.error is None:
                colours[series.label] = f"C{len(colours) - 1}"
                style = ["-", "--", "-."][len(colours) % 3]
                look = {"color": colours[series.label], "linestyle": style}
                ax.plot(series.x, series.y, label=series.label, **look)
            else:
                bars = [2 * error for error in series.error]
                look = {"color": colours[series.like], "fmt": series.marker, "capsize": 2}
                look |= {"markersize": 6, "markerfacecolor": "none"}
                ax.errorbar(series.x, series.y, bars, label=series.label or None, **look)
        xscale, yscale = figure.scales
        ax.set(xlabel=figure.xlabel, ylabel=ylabel, xscale=xscale, yscale=yscale)
        if xscale == "log":
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        if "k" in figure.xlabel.split():
            ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8)
    canvas.suptitle(f"{figure.title}. {figure.caption}", fontsize=8, wrap=True)
    write_figure(path, canvas)
