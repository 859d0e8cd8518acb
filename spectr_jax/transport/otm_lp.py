r"""OTM-k by linear programming, the oracle for `otm` (SpecTr, section 5, problem (4)).

The cost of a coupling depends on the drafts only through the set S of their tokens, and only
accepted mass needs a variable, the flow f from S to one of its tokens. What flows nowhere is
rejected:

$$\alpha_k = \max_{f \ge 0} \sum_S \sum_{y \in S} f(S, y) \quad \text{with} \quad
\sum_{y \in S} f(S, y) \le P(S), \quad \sum_{S \ni y} f(S, y) \le q(y).$$

Analysis only: SciPy's HiGHS on the host, in float64; `select` works through a callback, for tests.
"""

import functools
import math

import numpy as np
from jaxtyping import PRNGKeyArray

from spectr_jax.transport.base import Choice, select_by_pmf
from spectr_jax.transport.types import Drafts, ExactProbs, Probs, Valid
from spectr_jax.utils.errors import UserError

LARGEST = 1_000_000
"""The most flow variables: more take minutes and gigabytes."""


def select(key: PRNGKeyArray, p: Probs, q: Probs, drafts: Drafts, valid: Valid) -> Choice:
    """Returns the choice of a token; see `Plan.select`. The host solves the program, so it is for
    small vocabularies."""
    return select_by_pmf(pmf, key, p, q, drafts, valid)


def pmf(p: ExactProbs, q: ExactProbs, drafts: tuple[int, ...]) -> ExactProbs:
    """Returns the exact distribution of the token; see `Plan.pmf`.

    Raises:
      UserError: the program would be too large.
    """
    _, pmfs, residual = _solve(p.tobytes(), q.tobytes(), len(drafts))
    accepted = pmfs[frozenset(drafts)]
    result: ExactProbs = accepted + (1 - accepted.sum()) * residual
    return result


def acceptance(p: ExactProbs, q: ExactProbs, k: int) -> float:
    """Returns the value of the program; see `Plan.acceptance`. A residual that could hit a draft
    would raise it.

    Raises:
      UserError: the program would be too large.
    """
    return _solve(p.tobytes(), q.tobytes(), k)[0]


def set_probabilities(p: ExactProbs, k: int) -> dict[frozenset[int], float]:
    """Returns the probability of each set of tokens that k i.i.d. drafts from p [V] can show."""
    support = np.flatnonzero(p).tolist()
    sets: dict[frozenset[int], float] = {frozenset(): 1.0}
    for _ in range(k):
        longer: dict[frozenset[int], float] = {}
        for members, probability in sets.items():
            for token in support:
                larger = members | {token}
                longer[larger] = longer.get(larger, 0.0) + probability * float(p[token])
        sets = longer
    return sets


@functools.lru_cache(maxsize=64)
def _solve(
    p_bytes: bytes, q_bytes: bytes, k: int
) -> tuple[float, dict[frozenset[int], ExactProbs], ExactProbs]:
    """Returns the largest acceptance, the accepted part [V] of the token's pmf for each set, and
    the residual [V]."""
    import scipy.optimize  # Imported late: decoding solves no programs, and it takes half a second.
    import scipy.sparse

    p, q = np.frombuffer(p_bytes), np.frombuffer(q_bytes)
    support = int(np.sum(p > 0))
    size = sum(m * math.comb(support, m) for m in range(1, min(k, support) + 1))
    if size > LARGEST:
        raise UserError(
            f"the linear program of OTM-k for {support} drafted tokens and k={k} has {size:,} flow "
            "variables, more than "
            f"{LARGEST:,}; use plan 'otm', which has the same acceptance, or fewer tokens or drafts"
        )
    sets = set_probabilities(p, k)
    rows = np.repeat(np.arange(len(sets)), [len(members) for members in sets])
    tokens = np.concatenate([sorted(members) for members in sets])
    columns = np.arange(len(rows))
    limits = scipy.sparse.csr_array(
        (np.ones(2 * len(rows)), (np.append(rows, len(sets) + tokens), np.append(columns, columns)))
    )
    bounds = np.append(list(sets.values()), q[: limits.shape[0] - len(sets)])
    result = scipy.optimize.linprog(
        -np.ones(len(rows)),
        A_ub=limits,
        b_ub=bounds,
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if result.status != 0:
        raise RuntimeError(f"HiGHS did not solve OTM-k: {result.message}")
    flow = np.maximum(result.x, 0)
    pmfs = np.zeros((len(sets), len(q)))
    masses = np.array(list(sets.values()))
    pmfs[rows, tokens] = flow / masses[rows]
    pmfs /= np.maximum(
        pmfs.sum(axis=1, keepdims=True), 1
    )  # What the solver's tolerance is to a tiny mass.
    residual = np.maximum(q - masses @ pmfs, 0)
    residual = residual / residual.sum() if residual.sum() > 0 else q
    return float(flow.sum()), dict(zip(sets, pmfs, strict=True)), residual
