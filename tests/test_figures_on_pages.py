"""Each figure that a page states is the one row and field of the table it comes from."""

import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README, METHOD, SPEED = "README.md", "docs/which_method.md", "docs/speed.md"
LADDER_97M, H200_ONE = "target_97m/cpu/tokens_per_call", "target_97m/h200/one/tokens_per_call"
H200_MANY, ONE_97M = "target_97m/h200/many/tokens_per_call", "target_97m/fastest_1/auto"
ONE_20M, MANY_20M = "ladder/fastest_1/auto", "ladder/fastest_32/auto"
ONE_SMOLLM2, EIGHT_SMOLLM2 = "smollm2/fastest_1/auto", "smollm2/fastest_8/auto"
TREES, SPEC_BENCH = "trees/trees", "spec_bench/spec_bench"


def chains(algorithm, num_drafts, draft_length, draft="6M"):
    return {
        "algorithm": algorithm,
        "num_drafts": num_drafts,
        "draft_length": draft_length,
        "draft": draft,
    }


BLOCK_1, BLOCK_2, BLOCK_3 = ({"method": "block", "shape": shape} for shape in ("1", "1,1", "1,1,1"))
LONE_CHAIN = {"method": "speculative", "nodes": 8}
PAPER_ROWS = [
    (f"| {K} x {L} |", LADDER_97M, chains(algorithm, K, L), "tokens_per_call", "{:.2f}")
    for K, L in ((2, 4), (4, 4), (8, 4), (8, 8))
    for algorithm in ("spectr", "otm_block", "otm_layer")
]
# Page, the start of its line, table, row, field, format; the line must have the figure.
CLAIMS = [
    *((README, *row) for row in PAPER_ROWS),
    (README, "| NVIDIA H200", H200_ONE, chains("speculative", 1, 4), "speedup", "| {:.2f} |"),
    (README, "| NVIDIA H200", H200_ONE, chains("speculative", 1, 4), "tokens_per_call", "{:.2f}"),
    (README, "| two CPU cores, int8 | 97M", ONE_97M, BLOCK_3, "speedup", "| {:.2f} |"),
    (README, "| two CPU cores, int8 | 97M", ONE_97M, BLOCK_3, "measured_per_call", "{:.2f}"),
    (README, "| two CPU cores, int8 | SmolLM2-135M, trained", ONE_SMOLLM2, BLOCK_1, "speedup", "| {:.2f} |"),
    (README, "| two CPU cores, int8 | SmolLM2-135M, t", ONE_SMOLLM2, BLOCK_1, "measured_per_call", "{:.2f}"),
    (METHOD, "| One sequence, CPU |", ONE_97M, BLOCK_3, "speedup", "97M target: {:.2f} x"),
    (METHOD, "| One sequence, CPU |", ONE_SMOLLM2, BLOCK_1, "speedup", "SmolLM2-135M: {:.2f} x"),
    (METHOD, "| One sequence, CPU, target", ONE_20M, BLOCK_1, "speedup", "{:.2f} x"),
    (METHOD, "| One sequence, GPU", H200_ONE, chains("speculative", 1, 4), "speedup", "{:.2f} x and"),
    (METHOD, "| One sequence, GPU", H200_ONE, chains("spectr", 8, 4), "speedup", "up to {:.2f} x"),
    (METHOD, "| Many sequences", MANY_20M, BLOCK_2, "speedup", "`block` {:.2f} x"),
    (METHOD, "| Many sequences", H200_MANY, chains("block", 1, 4), "speedup", "250 at once: {:.2f} x"),
    (METHOD, "| Scoring nearly free, many", TREES, {"method": "otm_layer", "size": 32}, "tokens_per_call", "{:.2f} tokens"),
    (METHOD, "| Scoring nearly free, many", TREES, {"method": "spectr", "size": 32}, "tokens_per_call", "K-SEQ {:.2f}"),
    (METHOD, "| Scoring nearly free, one", TREES, {"method": "block", "nodes": 8}, "tokens_per_call", "{:.2f} tokens"),
    (METHOD, "| Scoring nearly free, one", TREES, LONE_CHAIN, "tokens_per_call", "`speculative` {:.2f}"),
    (METHOD, "| The same output", TREES, {"method": "ersd", "size": 64}, "tokens_per_call", "{:.2f} tokens"),
    (METHOD, "| Reproducing", LADDER_97M, chains("spectr", 2, 4), "tokens_per_call", "{:.2f} to"),
    (METHOD, "| Reproducing", LADDER_97M, chains("spectr", 8, 8), "tokens_per_call", "to {:.2f}"),
    (METHOD, "- One chain soon", TREES, {"method": "block", "size": 16}, "tokens_per_call", "{:.2f} tokens"),
    (METHOD, "- One chain soon", TREES, {"method": "block", "size": 64}, "tokens_per_call", "and {:.2f} at 64"),
    (METHOD, "  emits 2.88", "ladder/tokens_per_call", chains("otm_block", 4, 4, "2M"), "tokens_per_call", "emits {:.2f}"),
    (METHOD, "  emits 2.88", "ladder/tokens_per_call", chains("otm_block", 4, 4), "tokens_per_call", "and {:.2f} with 6M"),
    (SPEED, "| 97M, 6M, 1 | CPU", ONE_97M, BLOCK_3, "speedup", "| {:.2f} |"),
    (SPEED, "| 20M, 2M, 1 |", ONE_20M, BLOCK_1, "speedup", "| {:.2f} |"),
    (SPEED, "| 20M, 2M, 32 |", MANY_20M, BLOCK_2, "speedup", "| {:.2f} |"),
    (SPEED, "| 97M, 6M, 1 | H200, bfloat16 | `spec", H200_ONE, chains("speculative", 1, 4), "speedup", "| {:.2f} |"),
    (SPEED, "| 97M, 6M, 1 | H200, bfloat16 | `otm", H200_ONE, chains("otm_layer", 8, 4), "speedup", "| {:.2f} |"),
    (SPEED, "| 97M, 6M, 250", H200_MANY, chains("block", 1, 4), "speedup", "| {:.2f} |"),
]  # fmt: skip


def figure(table, row, field):
    """Returns the highest value of the field among the rows that match: the best tree of a size."""
    rows = json.loads((ROOT / f"results/{table}.json").read_text())["rows"]
    found = [each[field] for each in rows if row.items() <= each.items()]
    assert found, (table, row)
    return max(found)


def line_of(page, start):
    lines = [line for line in (ROOT / page).read_text().splitlines() if line.startswith(start)]
    assert len(lines) == 1, (page, start, lines)
    return lines[0]


@pytest.mark.parametrize(("page", "start", "table", "row", "field", "form"), CLAIMS)
def test_a_stated_figure_is_that_of_its_table(page, start, table, row, field, form):
    assert form.format(figure(table, row, field)) in line_of(page, start)


@pytest.mark.parametrize("page", [README, METHOD])
@pytest.mark.parametrize("method", ["lookup"])
def test_the_speedup_on_spec_bench_is_that_of_its_table(page, method):
    rows = json.loads((ROOT / f"results/{SPEC_BENCH}.json").read_text())["rows"]
    found = [row for row in rows if row["method"].startswith(method) and row["task"] == "overall"]
    best = max(found, key=lambda row: (row["temperature"] == 0, row["speedup"]))
    start = (
        "| two CPU cores, int8 | SmolLM2-135M, no draft" if page == README else "| No draft model"
    )
    assert f"{best['speedup']:.2f}" in line_of(page, start)


@pytest.mark.parametrize(
    ("start", "table"),
    [
        ("| 20M, int8, 1", ONE_20M),
        ("| 97M, int8, 1", ONE_97M),
        ("| SmolLM2-135M, int8, 1", ONE_SMOLLM2),
        ("| SmolLM2-135M, int8, 8", EIGHT_SMOLLM2),
        ("| 20M, bfloat16, 32", MANY_20M),
    ],
)
def test_call_times_are_those_of_their_table(start, table):
    cells = [cell.strip() for cell in line_of(METHOD, start).split("|")[2:5]]
    times = json.loads((ROOT / f"results/{table}.json").read_text())["target_ms"]
    assert cells == [f"{times[n]:.1f}" if n in times else "" for n in ("1", "5", "17")]
