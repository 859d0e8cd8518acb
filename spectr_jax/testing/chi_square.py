"""Chi-square tests of counts against a distribution."""

import numpy as np

LEAST = 1e-6
"""The p-value that is too small to be chance: the check of a plan makes 56 tests."""


def p_value(counts: np.ndarray, pmf: np.ndarray) -> float:
    """Returns the p-value of `counts` against `pmf`, up to a factor; outcomes expected fewer than 5
    times are merged with the next rarest."""
    import scipy.special  # Imported late: decoding tests nothing. `scipy.stats` takes a second.

    expected = counts.sum() * pmf / pmf.sum()
    common = expected >= 5
    if common.sum() < 2:
        return 1.0
    cells = np.where(common, np.arange(len(pmf)), np.argmin(np.where(common, expected, np.inf)))
    observed, expected = (np.bincount(cells, part, len(pmf))[common] for part in (counts, expected))
    statistic = np.sum((observed - expected) ** 2 / expected)
    return float(scipy.special.chdtrc(len(expected) - 1, statistic))
