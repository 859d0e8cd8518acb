"""ERSD, Figures 3 and 4: tokens per call and the acceptance of each further node, in theory and
measured, with bounds.

The theory assumes that the acceptance by child index R is the same at all nodes (0-th order).
"""

import pathlib
from collections.abc import Sequence

import numpy as np

from spectr_jax.experiments.figures import tunstall
from spectr_jax.experiments.figures.base import Figure, Series, write
from spectr_jax.experiments.measure.acceptance import Nodes, PairAcceptance

STRATEGIES = {
    "batch": "batch",
    "chain": "sequence",
    "SpecInfer": "SpecInfer tree",
    "optimal": "optimal tree",
}
"""Our names of the shapes, and the paper's."""
LEAST = 1e-3
"""The lowest acceptance that Figure 4 shows; lower ones are measured from a few events only."""


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
            tokens = (1 + np.cumsum(_theory(nodes, R))).tolist()
            series.append(Series(strategy, sizes, tokens, panel=panel))
            series.append(_measured(1 + np.cumsum(nodes.accepted, axis=1), strategy, panel))
        best = [tunstall.lemma_4_2(R, size, vocab_size).bound(size) for size in sizes]
        series.append(Series("Lemma 4.2, best m for each N", sizes, best, panel=panel))
        fixed = _bound_of_largest(R, sizes, vocab_size)
        series.append(Series(f"Lemma 4.2, m of N = {sizes[-1]}", sizes, fixed, panel=panel))
        first, last = (tunstall.theorem_4_1(R, vocab_size, size) for size in (1, sizes[-1]))
        notes.append(
            f"{name.upper()}: H[R] = {tunstall.entropy(R):.2f} bits, Theorem 4.1 (off the scale) "
            f"{first:.1f} at N = 1 and {last:.1f} at {sizes[-1]}"
        )
    low, high = tunstall.channel_bounds(acceptance.kl)
    caption = (
        "Expected number of tokens per call against the number of drafted tokens: theory (curves) "
        "from the acceptance by child index on batch trees, and measured (points). "
        f"{'; '.join(notes)}; KL = {low:.2f} bits, so that eqs. (6) and (8) bound H[R] of ERSD at "
        f"each node by {low:.2f} and {high:.2f} on average."
    )
    ylabels = tuple(f"tokens per call, {name.upper()}" for name in acceptance.R)
    scales = "log", "linear"
    return Figure("ERSD, Figure 3", caption, "number of drafted tokens N", ylabels, series, scales)


def figure_4(acceptance: PairAcceptance, vocab_size: int) -> Figure:
    """Returns the probability that each further drafted token is accepted."""
    series = []
    for panel, (name, R) in enumerate(acceptance.R.items()):
        for shape in ("batch", "chain", "optimal"):
            nodes, strategy = acceptance.nodes[name, shape], STRATEGIES[shape]
            sizes, theory = range(1, len(nodes.paths) + 1), _theory(nodes, R)
            shown = np.flatnonzero(theory >= LEAST)
            curve = (1 + shown).tolist(), theory[shown].tolist()
            series.append(Series(strategy, *curve, panel=panel))
            series.append(_measured(nodes.accepted, strategy, panel, LEAST))
        bound = np.diff(_bound_of_largest(R, sizes, vocab_size)).tolist()
        series.append(Series("Lemma 4.2, fixed m, differences", sizes[1:], bound, panel=panel))
    caption = (
        "Marginal probability of acceptance of the N-th drafted token: theory (curves) and "
        "measured (points)."
    )
    ylabels = tuple(f"acceptance of the N-th token, {name.upper()}" for name in acceptance.R)
    scales = "log", "log"
    return Figure("ERSD, Figure 4", caption, "number of drafted tokens N", ylabels, series, scales)


def _theory(nodes: Nodes, R: Sequence[float]) -> np.ndarray:
    """Returns [N], the acceptance of each node in theory."""
    return np.array([np.prod([R[rank] for rank in path]) for path in nodes.paths])


def _measured(values: np.ndarray, like: str, panel: int, least: float = 0.0) -> Series:
    """Returns points at N = 1, 2, 3, 4, 6, 8, 12, ... whose mean over seeds is at least `least`.

    `values` is [seeds, N]; the error is the standard error of the mean.
    """
    seeds, size = values.shape
    grid = sorted({n for power in range(8) for n in (2**power, 3 * 2**power) if n <= size})
    at = [n for n in grid if values[:, n - 1].mean() >= least]
    columns = values[:, np.array(at) - 1]
    error = np.zeros(len(at)) if seeds == 1 else columns.std(axis=0, ddof=1) / np.sqrt(seeds)
    label = "measured" if like == "batch" else ""
    return Series(label, at, columns.mean(axis=0).tolist(), error.tolist(), like, panel=panel)


def _bound_of_largest(R: Sequence[float], sizes: range, vocab_size: int) -> list[float]:
    """Returns Lemma 4.2 at each N, with the m that is best for the largest N."""
    best = tunstall.lemma_4_2(R, sizes[-1], vocab_size)
    return [best.bound(size) for size in sizes]
