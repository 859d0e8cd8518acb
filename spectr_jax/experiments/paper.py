"""The figures that the papers report, printed next to ours."""

TOKENS_PER_CALL = {
    "2M": {
        ("speculative", 1, 4): 1.86,
        ("spectr", 2, 4): 2.07,
        ("spectr", 4, 4): 2.32,
        ("spectr", 8, 4): 2.56,
        ("speculative", 1, 8): 1.91,
        ("spectr", 2, 8): 2.15,
        ("spectr", 4, 8): 2.41,
        ("spectr", 8, 8): 2.68,
    },
    "6M": {
        ("speculative", 1, 4): 2.21,
        ("spectr", 2, 4): 2.43,
        ("spectr", 4, 4): 2.74,
        ("spectr", 8, 4): 2.99,
        ("speculative", 1, 8): 2.33,
        ("spectr", 2, 8): 2.61,
        ("spectr", 4, 8): 2.96,
        ("spectr", 8, 8): 3.27,
    },
    "20M": {
        ("speculative", 1, 4): 2.71,
        ("spectr", 2, 4): 2.96,
        ("spectr", 4, 4): 3.28,
        ("spectr", 8, 4): 3.49,
        ("speculative", 1, 8): 3.12,
        ("spectr", 2, 8): 3.48,
        ("spectr", 4, 8): 3.85,
        ("spectr", 8, 8): 4.15,
    },
}
"""SpecTr, Table 4 (its 6M rows, rounded, are Table 2): draft -> (method, K, L) -> tokens per
serial call of the 97M."""

LATENCY = {
    ("97M", 4, 1): (1.00, 0.16),
    ("97M", 4, 2): (1.01, 0.15),
    ("97M", 4, 4): (1.06, 0.10),
    ("97M", 4, 8): (1.10, 0.16),
    ("97M", 8, 1): (1.01, 0.18),
    ("97M", 8, 2): (1.09, 0.25),
    ("97M", 8, 4): (1.10, 0.09),
    ("97M", 8, 8): (1.42, 0.40),
    ("6M", 4, 1): (0.18, 0.02),
    ("6M", 4, 2): (0.19, 0.04),
    ("6M", 4, 4): (0.18, 0.09),
    ("6M", 4, 8): (0.20, 0.13),
    ("6M", 8, 1): (0.17, 0.04),
    ("6M", 8, 2): (0.19, 0.05),
    ("6M", 8, 4): (0.16, 0.02),
    ("6M", 8, 8): (0.18, 0.04),
}
"""SpecTr, Tables 1 and 3: (model, length, batch) -> mean and deviation of GPU latency relative
to the 97M at (4, 1)."""

SPEC_BENCH = (
    ("SpS", "Vicuna-13B", 1.54, "quoted, not checked"),
    ("PLD", "Vicuna-13B", 1.56, "quoted, not checked"),
    ("EAGLE-3", "-", 3.0, "quoted, not checked"),
    ("SpS", "Vicuna-13B, A100", 1.49, "Spec-Bench's leaderboard, commit 09244ff"),
    ("PLD", "Vicuna-13B, A100", 1.48, "Spec-Bench's leaderboard, commit 09244ff"),
    ("EAGLE", "Vicuna-13B, A100", 2.34, "Spec-Bench's leaderboard, commit 09244ff"),
)
"""Published greedy Spec-Bench results: method, model and hardware, speedup over the baseline,
source. SpS drafts with a small model, PLD is prompt lookup."""
