r"""OTM-k by linear programming, the reference for `otm` (SpecTr, section 5, problem (4)).

The cost of a coupling depends on the drafts only through the set S of their tokens. The variables
are the accepted masses f(S, y) of the tokens y of S; the rest is rejected:

$$\alpha_k = \max_{f \ge 0} \sum_S \sum_{y \in S} f(S, y) \quad \text{with} \quad
\sum_{y \in S} f(S, y) \le P(S), \quad \sum_{S \ni y} f(S, y) \le q(y).$$

The plan is for analysis: SciPy's HiGHS solves the program in float64 on the host.
"""

import collections
import itertools
import math

import numpy as np

from spectr_jax.transport.base import Plan, cached, exact_residual
from spectr_jax.transport.iopt import minimise
from spectr_jax.transport.types import ExactProbs
from spectr_jax.utils.errors import UserError

LARGEST = 1_000_000
"""The largest number of variables. More take minutes and gigabytes."""


class OTMLinearProgram(Plan):
    """OTM-k by linear programming, for small vocabularies."""

    def exact_pmf(self, p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
        _, pmfs, residual = _solve(p, q, len(drafts))
        accepted = pmfs[frozenset(drafts)]
        return accepted + (1 - accepted.sum()) * residual

    def exact_acceptance(self, p: ExactProbs, q: ExactProbs, k: int) -> float:
        # The value of the program: the residual of an optimal plan never equals a draft.
        return _solve(p, q, k)[0]


def set_probabilities(p: ExactProbs, k: int) -> dict[frozenset[int], float]:
    """Returns the probability of each set of tokens that k i.i.d. drafts from p [V] can form."""
    support = np.flatnonzero(p).tolist()
    sets: dict[frozenset[int], float] = {frozenset(): 1.0}
    for _ in range(k):
        longer: dict[frozenset[int], float] = collections.defaultdict(float)
        for (members, probability), token in itertools.product(sets.items(), support):
            longer[members | {token}] += probability * float(p[token])
        sets = longer
    return sets


@cached
def _solve(
    p: ExactProbs, q: ExactProbs, k: int
) -> tuple[float, dict[frozenset[int], ExactProbs], ExactProbs]:
    """Returns the acceptance, the accepted pmf [V] by set of drafts, and the residual [V]."""
    import scipy.sparse

    support = int(np.sum(p > 0))
    size = sum(m * math.comb(support, m) for m in range(1, min(k, support) + 1))
    if size > LARGEST:
        raise UserError(
            f"V={support}, k={k}: the program has {size:,} variables, more than {LARGEST:,}; use "
            "plan 'otm', which has the same acceptance"
        )
    sets = set_probabilities(p, k)
    rows = np.repeat(np.arange(len(sets)), [len(members) for members in sets])
    tokens = np.concatenate([sorted(members) for members in sets])
    places = np.append(rows, len(sets) + tokens), np.tile(np.arange(len(rows)), 2)
    limits = scipy.sparse.csr_array((np.ones(2 * len(rows)), places))
    masses = np.array(list(sets.values()))
    bounds = np.append(masses, q[: limits.shape[0] - len(sets)])
    flow = minimise(-np.ones(len(rows)), limits, bounds)
    pmfs = np.zeros((len(sets), len(q)))
    pmfs[rows, tokens] = flow / masses[rows]
    # For a set of tiny mass, the solver's tolerance can make the sum larger than 1.
    pmfs /= np.maximum(pmfs.sum(axis=1, keepdims=True), 1)
    residual = exact_residual(masses @ pmfs, q)
    return float(flow.sum()), dict(zip(sets, pmfs, strict=True)), residual
