"""The figures that the papers report, to be printed beside ours."""

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
"""SpecTr, Table 4 (its 6M rows, rounded, are Table 2): draft -> (method, K, L) -> tokens per serial call of the 97M."""
