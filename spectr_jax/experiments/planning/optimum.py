r"""The most tokens a call that any lossless verifier can emit on a tree of i.i.d. drafts, by a linear program.

A verifier sees the drafted tree x and passes through its node s with probability a_s(x). It is lossless only if the token
that follows s has the target's distribution, whether it is a draft or not, so with $M(s) = \sum_x P(x) a_s(x)$

$$a_{\text{root}} = 1, \qquad \sum_t a_{st}(x) \le a_s(x), \qquad M(st) \le q(t \mid s) \ M(s),$$

and any such a can be completed to a lossless verifier. Its expected tokens are $1 + \sum_s M(s)$ without the root. Drafted
trees with the same set of sequences count as one. For tiny trees and vocabularies: there are $V^N$ drafted trees.
"""

import itertools
from collections.abc import Callable

import numpy as np

from spectr_jax.decoding.tree import Tree
from spectr_jax.utils.errors import UserError

MOST = 1_000_000
"""Drafted trees that are enumerated."""

Probs = Callable[[tuple[int, ...]], np.ndarray]


def most_tokens(p: Probs, q: Probs, tree: Tree) -> float:
    """Returns the expected tokens of one call of the best lossless verifier.

    Args:
      p: the draft distribution [V] of the token that follows a sequence of drafted tokens.
      q: the target's.
      tree: of i.i.d. drafts.

    Raises:
      UserError: there are too many drafted trees.
    """
    import scipy.optimize  # Imported late: decoding solves no programs, and it takes half a second.
    import scipy.sparse

    drafted = _drafted_trees(p, tree)
    columns = {
        (x, s): at
        for at, (x, s) in enumerate(
            (x, s) for x, sequences in enumerate(drafted) for s in sequences
        )
    }
    weight = np.array(list(drafted.values()))
    entries: list[tuple[int, int, float]] = []
    limits: list[float] = []

    def below(mass: list[tuple[tuple[int, tuple[int, ...]], float]], above, factor: float) -> None:
        """A row: the mass is at most `factor` times that of `above`; of the root, which is 1 on each tree, where it is
        ()."""
        row, limit = len(limits), 0.0
        entries.extend((row, columns[key], value) for key, value in mass)
        for (x, s), value in above:
            if s:
                entries.append((row, columns[x, s], -factor * value))
            else:
                limit += factor * value
        limits.append(limit)

    carried: dict[tuple[int, ...], list[int]] = {}
    for x, sequences in enumerate(drafted):
        for s in sequences:
            carried.setdefault(s, []).append(x)
        for s in {s[:-1] for s in sequences}:
            below([((x, t), 1.0) for t in sequences if t[:-1] == s], [((x, s), 1.0)], 1.0)
    for s, trees in carried.items():
        above = carried[s[:-1]] if s[:-1] else range(len(weight))
        below(
            [((x, s), weight[x]) for x in trees],
            [((x, s[:-1]), weight[x]) for x in above],
            float(q(s[:-1])[s[-1]]),
        )

    rows, at, values = zip(*entries, strict=True)
    matrix = scipy.sparse.csr_array((values, (rows, at)), shape=(len(limits), len(columns)))
    gain = -np.array([weight[x] for x, _ in columns])
    found = scipy.optimize.linprog(gain, matrix, limits, bounds=(0, 1), method="highs")
    return 1.0 - float(found.fun)


def _drafted_trees(p: Probs, tree: Tree) -> dict[frozenset[tuple[int, ...]], float]:
    """Returns the probability of each set of drafted sequences."""
    vocabulary = len(p(()))
    if vocabulary**tree.size > MOST:
        raise UserError(
            f"{vocabulary} tokens on {tree.size} nodes make more than {MOST:,} drafted trees; give fewer"
        )
    drafted: dict[frozenset[tuple[int, ...]], float] = {}
    for tokens in itertools.product(range(vocabulary), repeat=tree.size):
        sequences: list[tuple[int, ...]] = [()]
        chance = 1.0
        for node in range(1, tree.size + 1):
            before = sequences[tree.parent[node]]
            chance *= p(before)[tokens[node - 1]]
            sequences.append((*before, tokens[node - 1]))
        if chance > 0:
            key = frozenset(sequences[1:])
            drafted[key] = drafted.get(key, 0.0) + chance
    return drafted
