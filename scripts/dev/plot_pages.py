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


def best_by_size(rows: list[dict], method: str) -> list[tuple[int, float]]:
    """Returns, for each number of drafted tokens, the most tokens per call on any tree."""
    best: dict[int, float] = {}
    for row in rows:
        if row["method"] == method and row["nodes"]:
            best[row["size"]] = max(best.get(row["size"], 0.0), row["tokens_per_call"])
    return sorted(best.items())


def best_speedup(table: str) -> float:
    """Returns the highest measured speedup of a method with drafts."""
    return max(row["speedup"] for row in read(table) if row["nodes"])


def plot_tokens() -> None:
    """Draws tokens per call against drafted tokens: 6M target, 2M drafts."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    rows = read("trees/trees")
    for method in METHODS:
        axes.plot(*zip(*best_by_size(rows, method), strict=True), marker="o", label=method)
    axes.set(xscale="log", xlabel="Drafted tokens per call", ylabel="Tokens/call")
    axes.set_xticks([8, 16, 32, 64], ["8", "16", "32", "64"])
    axes.minorticks_off()
    save(figure, axes, "tokens_by_size")


def plot_speed() -> None:
    """Draws the best speedup over the baseline against the number of sequences at once."""
    figure, axes = plt.subplots(figsize=(6, 3.6))
    markers = iter("oDs^")
    for label, points in SPEEDS.items():
        speeds = [best_speedup(table) for _, table in points]
        axes.plot(
            [n for n, _ in points], speeds, marker=next(markers), ms=8, mfc="none", label=label
        )
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xscale="log", xlabel="Sequences at once", ylabel="Best speedup over the baseline")
    axes.set_xticks([1, 8, 32, 250], ["1", "8", "32", "250"])
    axes.minorticks_off()
    save(figure, axes, "speed_by_batch")


def save(figure, axes, name: str) -> None:
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    FIGURES.mkdir(exist_ok=True)
    figure.savefig(FIGURES / f"{name}.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    plot_tokens()
    plot_speed()
