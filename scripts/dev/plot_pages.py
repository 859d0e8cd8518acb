"""Draws the two plots of docs/which_method.md from the tables in results/.

python scripts/dev/plot_pages.py
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs/figures"
METHODS = ("otm_layer", "traversal", "otm_block", "gsd", "spectr", "ersd", "block", "speculative")
SIZES = (8, 16, 32, 64)
SPEEDS = {  # Line of the plot: (sequences at once, table).
    "97M, 6M drafts, H200": [
        (1, "target_97m/h200/one/tokens_per_call"),
        (250, "target_97m/h200/many/tokens_per_call"),
    ],
    "97M, 6M drafts, CPU": [(1, "target_97m/fastest_1/auto")],
    "SmolLM2-135M, its draft, CPU": [(1, "smollm2/fastest_1/auto"), (8, "smollm2/fastest_8/auto")],
    "20M, 2M drafts, CPU": [(1, "ladder/fastest_1/auto"), (32, "ladder/fastest_32/auto")],
}


def read(table: str) -> list[dict]:
    """Returns the rows of a table in results/."""
    return json.loads((ROOT / f"results/{table}.json").read_text())["rows"]


def plot_tokens() -> None:
    """Draws the best tokens per call of each method against the number of drafted tokens."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.8), sharey=True)
    tables = {"6M target, 2M drafts": "trees/trees", "20M target, 2M drafts": "ladder/trees/trees"}
    for axes, (title, table) in zip(panels, tables.items(), strict=True):
        rows = [row for row in read(table) if row["nodes"]]
        for color, method in enumerate(METHODS):
            best = dict.fromkeys(sorted({row["size"] for row in rows}), 0.0)
            for row in rows:
                if row["method"] == method:
                    best[row["size"]] = max(best[row["size"]], row["tokens_per_call"])
            axes.plot(list(best), list(best.values()), "o-", color=f"C{color}", label=method)
        axes.set(title=title, xlabel="Drafted tokens per call, at most")
        label(axes, SIZES)
    panels[0].set_ylabel("Tokens/call")
    panels[0].legend(fontsize=8)
    save(figure, "tokens_by_size")


def plot_speed() -> None:
    """Draws the best speedup over the baseline against the number of sequences at once."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    for marker, (name, points) in zip("oDs^", SPEEDS.items(), strict=True):
        best = [max(row["speedup"] for row in read(table) if row["nodes"]) for _, table in points]
        sequences = [n for n, _ in points]
        axes.plot(sequences, best, ":", marker=marker, ms=8, mfc="none", label=name)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="Sequences at once", ylabel="Best speedup over the baseline")
    label(axes, (1, 8, 32, 250))
    axes.legend(fontsize=8)
    save(figure, "speed_by_batch")


def label(axes, ticks: tuple[int, ...]) -> None:
    axes.set_xscale("log")
    axes.set_xticks(ticks, map(str, ticks))
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def save(figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FIGURES / f"{name}.png", dpi=96)
    plt.close(figure)


if __name__ == "__main__":
    plot_tokens()
    plot_speed()
