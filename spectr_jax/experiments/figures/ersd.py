"""ERSD, Figures 3 and 4: tokens per call and the acceptance of each further node, in theory and
measured, with bounds."""

import dataclasses
import pathlib

import numpy as np

from spectr_jax.experiments.figures import tunstall
from spectr_jax.experiments.figures.base import Figure, Series, write
from spectr_jax.experiments.measure.acceptance import PairAcceptance

STRATEGIES = {
    "batch": "batch",
    "chain": "sequence",
    "SpecInfer": "SpecInfer tree",
    "optimal": "optimal tree",
}
"""Our names of the shapes, and the paper's."""
LEAST = 1e-3
"""The least acceptance that Figure 4 shows; smaller ones rest on a handful of events."""


def write_figures(acceptance: PairAcceptance, vocab_size: int, workdir: pathlib.Path) -> None:
    """Writes both figures as PNG and JSON."""
    write(figure_3(acceptance, vocab_size), workdir / "ersd_figure_3")
    write(figure_4(acceptance, vocab_size), workdir / "ersd_figure_4")


def figure_3(acceptance: PairAcceptance, vocab_size: int) -> Figure:
    """Returns expected tokens per call against drafted tokens."""
    series, notes = [], []
    for panel, (name, R) in enumerate(acceptance.R.items()):
        for shape, strategy in STRATEGIES.items():
            nodes = acceptance.nodes[name, shape]
            sizes = range(1, len(nodes.paths) + 1)
            series.append(
                Series(strategy, sizes, (1 + np.cumsum(_theory(nodes, R))).tolist(), panel=panel)
            )
            series.append(_measured(nodes.tokens(), strategy, panel))
        series.append(_bound("Lemma 4.2, least over m", R, sizes, None, vocab_size, panel))
        series.append(
            _bound(f"Lemma 4.2, m of N = {sizes[-1]}", R, sizes, sizes[-1], vocab_size, panel)
        )
        theorem = [tunstall.theorem_4_1(R, vocab_size, size) for size in (1, sizes[-1])]
        notes.append(
            f"{name.upper()}: H[R] = {tunstall.entropy(R):.2f} bits, Theorem 4.1 (off the scale) "
            f"{theorem[0]:.1f} at N = 1 "
            f"and {theorem[1]:.1f} at {sizes[-1]}"
        )
    low, high = tunstall.channel_bounds(acceptance.kl)
    caption = (
        "Expected number of tokens a call against the number of drafted tokens: theory (curves) "
        "from the acceptance by "
        f"child index of batch runs, and measured (points). {'; '.join(notes)}; KL = {low:.2f} "
        "bits, so that eqs. (6) and "
        f"(8) bound H[R] of ERSD at each node by {low:.2f} and {high:.2f} on average."
    )
    ylabels = tuple(f"tokens a call, {name.upper()}" for name in acceptance.R)
    return Figure(
        "ERSD, Figure 3", caption, "number of drafted tokens N", ylabels, series, ("log", "linear")
    )


def figure_4(acceptance: PairAcceptance, vocab_size: int) -> Figure:
    """Returns the probability that each further drafted token is accepted."""
    series = []
    for panel, (name, R) in enumerate(acceptance.R.items()):
        for shape in ("batch", "chain", "optimal"):
            nodes, strategy = acceptance.nodes[name, shape], STRATEGIES[shape]
            sizes = range(1, len(nodes.paths) + 1)
            theory = _theory(nodes, R)
            shown = [size for size in sizes if theory[size - 1] >= LEAST]
            series.append(
                Series(strategy, shown, theory[np.array(shown) - 1].tolist(), panel=panel)
            )
            series.append(_measured(nodes.accepted, strategy, panel, LEAST))
        bound = _bound(
            "Lemma 4.2, fixed m, differences",
            R,
            range(1, sizes[-1] + 1),
            sizes[-1],
            vocab_size,
            panel,
        )
        series.append(dataclasses.replace(bound, x=sizes[1:], y=np.diff(bound.y).tolist()))
    caption = "Marginal probability of acceptance of the N-th drafted token: theory (curves) and measured (points)."
    ylabels = tuple(f"acceptance of the N-th token, {name.upper()}" for name in acceptance.R)
    return Figure(
        "ERSD, Figure 4", caption, "number of drafted tokens N", ylabels, series, ("log", "log")
    )


def _theory(nodes, R) -> np.ndarray:
    """Returns [N] acceptance of each node under 0-th order R."""
    return np.array([np.prod([R[rank] for rank in path]) for path in nodes.paths])


def _measured(values: np.ndarray, like: str, panel: int, least: float = 0.0) -> Series:
    """Points of at least `least` at N = 1, 2, 3, 4, 6, 8, 12, ...; the error is that of the mean
    over seeds."""
    size, mean = values.shape[1], values.mean(axis=0)
    grid = sorted({n for power in range(8) for n in (2**power, 3 * 2**power) if n <= size})
    at = [n for n in grid if mean[n - 1] >= least]
    columns = values[:, np.array(at) - 1]
    error = (
        columns.std(axis=0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros(len(at))
    )
    label = "measured" if like == "batch" else ""
    return Series(label, at, columns.mean(axis=0).tolist(), error.tolist(), like, panel=panel)


def _bound(label: str, R, sizes, fixed: int | None, vocab_size: int, panel: int) -> Series:
    """Lemma 4.2, at the best m for each N, or at the one that is best for N = `fixed`."""
    if fixed is None:
        return Series(
            label,
            sizes,
            [tunstall.lemma_4_2(R, size, vocab_size).bound for size in sizes],
            panel=panel,
        )
    best = tunstall.lemma_4_2(R, fixed, vocab_size)
    return Series(label, sizes, [best.at(size) for size in sizes], panel=panel)
