r"""The most tokens that any exact verifier can emit per call on a tree of i.i.d. drafts.

A verifier sees the drafted tree x and passes through its node s with probability $a_s(x)$. It is
exact only if the token that follows s has the target's distribution, whether it is a draft or not.
With $M(s) = \sum_x P(x) a_s(x)$ this gives

$$a_{\text{root}} = 1, \qquad \sum_t a_{st}(x) \le a_s(x), \qquad M(st) \le q(t \mid s) \ M(s),$$

and any such a can be completed to an exact verifier. The expected number of tokens is 1 plus the
sum of M over all s but the root, so the best verifier is the solution of a linear program. Drafted
trees with the same set of sequences count as one.
"""

import collections
from collections.abc import Callable

import numpy as np

from spectr_jax.decoding.tree import Tree
from spectr_jax.transport.iopt import minimise
from spectr_jax.transport.types import ExactProbs
from spectr_jax.utils.errors import UserError

LARGEST = 1_000_000
"""The largest number of drafted trees."""

Sequence = tuple[int, ...]
Distribution = Callable[[Sequence], ExactProbs]


def most_tokens(p: Distribution, q: Distribution, tree: Tree) -> float:
    """Returns the expected tokens of one call of the best exact verifier.

    Args:
      p: the draft distribution [V] of the token that follows a sequence of drafted tokens.
      q: the target's.
      tree: a small tree of i.i.d. drafts.

    Raises:
      UserError: there are too many drafted trees.
    """
    import scipy.sparse

    if not tree.size:
        return 1.0
    drafted = drafted_trees(p, tree)
    weights = np.array(list(drafted.values()))
    variables = [(x, s) for x, sequences in enumerate(drafted) for s in sequences]
    column = {variable: index for index, variable in enumerate(variables)}
    trees_of: dict[Sequence, list[int]] = collections.defaultdict(list)
    for x, s in variables:
        trees_of[s].append(x)
    rows: list[dict[int, float]] = []
    limits: list[float] = []
    for x, sequences in enumerate(drafted):
        for above in {s[:-1] for s in sequences}:
            row = {column[x, s]: 1.0 for s in sequences if s[:-1] == above}
            rows.append(row | ({column[x, above]: -1.0} if above else {}))
            limits.append(0.0 if above else 1.0)
    for s, trees in trees_of.items():
        chance, above = float(q(s[:-1])[s[-1]]), s[:-1]
        parents = {column[x, above]: -chance * weights[x] for x in trees_of.get(above, ())}
        rows.append(parents | {column[x, s]: weights[x] for x in trees})
        limits.append(0.0 if above else chance)
    places = [(number, index) for number, row in enumerate(rows) for index in row]
    values = [value for row in rows for value in row.values()]
    matrix = scipy.sparse.csr_array((values, tuple(zip(*places, strict=True))))
    gains = weights[[x for x, _ in variables]]
    return 1.0 + float(gains @ minimise(-gains, matrix, np.array(limits)))


def drafted_trees(p: Distribution, tree: Tree) -> dict[frozenset[Sequence], float]:
    """Returns the probability of each set of sequences that i.i.d. drafts can spell."""
    drafted: dict[tuple[Sequence, ...], float] = {((),): 1.0}
    for parent in tree.parents:
        longer = {}
        for sequences, probability in drafted.items():
            above = sequences[parent]
            for token in np.flatnonzero(p(above)).tolist():
                longer[*sequences, (*above, token)] = probability * float(p(above)[token])
            if len(longer) > LARGEST:
                raise UserError(
                    f"tree of {tree.size} nodes: there are more than {LARGEST:,} drafted trees; give "
                    "fewer nodes"
                )
        drafted = longer
    distinct: dict[frozenset[Sequence], float] = collections.defaultdict(float)
    for sequences, probability in drafted.items():
        distinct[frozenset(sequences[1:])] += probability
    return distinct
