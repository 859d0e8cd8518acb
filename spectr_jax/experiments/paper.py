"""The numbers that the papers report, printed next to ours."""

_METHODS_AND_K = (("speculative", 1), ("spectr", 2), ("spectr", 4), ("spectr", 8))
_TABLE_4 = {
    ("2M", 4): (1.86, 2.07, 2.32, 2.56),
    ("2M", 8): (1.91, 2.15, 2.41, 2.68),
    ("6M", 4): (2.21, 2.43, 2.74, 2.99),
    ("6M", 8): (2.33, 2.61, 2.96, 3.27),
    ("20M", 4): (2.71, 2.96, 3.28, 3.49),
    ("20M", 8): (3.12, 3.48, 3.85, 4.15),
}
TOKENS_PER_CALL = {
    (draft, *method, length): tokens
    for (draft, length), row in _TABLE_4.items()
    for method, tokens in zip(_METHODS_AND_K, row, strict=True)
}
"""SpecTr, Table 4 (its 6M rows, rounded, are Table 2): (draft, method, K, L) -> tokens per
serial call of the 97M."""

_BATCH_SIZES = (1, 2, 4, 8)
_TABLES_1_AND_3 = {
    ("97M", 4): ((1.00, 0.16), (1.01, 0.15), (1.06, 0.10), (1.10, 0.16)),
    ("97M", 8): ((1.01, 0.18), (1.09, 0.25), (1.10, 0.09), (1.42, 0.40)),
    ("6M", 4): ((0.18, 0.02), (0.19, 0.04), (0.18, 0.09), (0.20, 0.13)),
    ("6M", 8): ((0.17, 0.04), (0.19, 0.05), (0.16, 0.02), (0.18, 0.04)),
}
LATENCY = {
    (model, length, batch): latency
    for (model, length), row in _TABLES_1_AND_3.items()
    for batch, latency in zip(_BATCH_SIZES, row, strict=True)
}
"""SpecTr, Tables 1 and 3: (model, length, batch) -> mean and standard deviation of GPU latency,
relative to the 97M at (4, 1)."""

_LEADERBOARD = "Spec-Bench's leaderboard, commit 09244ff"
SPEC_BENCH = (
    ("EAGLE-3", "-", 3.0, "quoted, not checked"),
    ("SpS", "Vicuna-13B, A100", 1.49, _LEADERBOARD),
    ("PLD", "Vicuna-13B, A100", 1.48, _LEADERBOARD),
    ("EAGLE", "Vicuna-13B, A100", 2.34, _LEADERBOARD),
)
"""Published greedy Spec-Bench results: method, model and hardware, speedup over the baseline,
source. SpS drafts with a small model; PLD is prompt lookup."""
