"""Chi-square tests of counts against a distribution."""

import numpy as np

LEAST = 1e-6
"""p-values below this fail. The check of a plan makes 56 tests."""


def p_value(counts: np.ndarray, pmf: np.ndarray) -> float:
    """Returns the p-value of `counts` [n] against `pmf` [n], which need not be normalised.

    Outcomes expected fewer than 5 times are merged with the next rarest.
    """
    import scipy.special  # Decoding does not need it; `scipy.stats` would take a second.

    expected = counts.sum() * pmf / pmf.sum()
    common = expected >= 5
    if common.sum() < 2:
        return 1.0
    cells = np.where(common, np.arange(len(pmf)), np.argmin(np.where(common, expected, np.inf)))
    observed, expected = (np.bincount(cells, part, len(pmf))[common] for part in (counts, expected))
    statistic = np.sum((observed - expected) ** 2 / expected)
    return float(scipy.special.chdtrc(len(expected) - 1, statistic))
