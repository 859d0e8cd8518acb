"""Bounds on the tokens per call of optimal trees, through Tunstall codes (ERSD, section 4).
Entropies in bits."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spectr_jax.experiments.planning.tree_search import optimal_order


def entropy(R: Sequence[float]) -> float:
    """Returns the entropy H[R] of acceptance by child index; the missing mass 1 - sum R counts as
    one more index, which makes it a lower bound."""
    pmf = np.append(np.asarray(R, float), max(1 - float(np.sum(R)), 0.0))
    pmf = pmf[pmf > 0]
    return float(-np.sum(pmf * np.log2(pmf)))


def theorem_4_1(R: Sequence[float], vocab_size: int, size: int) -> float:
    """ERSD, Theorem 4.1: (log V + log(N + 1)) / H[R] bounds the tokens a call of any tree of N =
    `size` nodes."""
    return (math.log2(vocab_size) + math.log2(size + 1)) / entropy(R)


class Lemma(NamedTuple):
    """Lemma 4.2 at some d and m.

    Attributes:
      d: child indices that the optimal tree explores.
      m: further indices, which share the rest of R evenly.
      bits: the entropy of R spread like this.
      bound: on the tokens a call of trees of the N that it was made for.
    """

    d: int
    m: int
    bits: float
    bound: float

    def at(self, size: int) -> float:
        """Returns the bound for trees of another N, which explore at most d indices."""
        return (math.log2(self.d + self.m) + math.log2(size + 1)) / self.bits


def lemma_4_2(R: Sequence[float], size: int, vocab_size: int) -> Lemma:
    """ERSD, Lemma 4.2: for trees of N = `size` nodes, the bound that is least over m; R [C] is 0-th
    order and descends."""
    d = max(max(node) for node in optimal_order(R, size)) + 1
    rest = max(1 - float(np.sum(R[:d])), 0.0)
    pmf = np.array([*R[:d], rest])
    lumped = float(-np.sum(pmf[pmf > 0] * np.log2(pmf[pmf > 0])))
    least = max(1, math.ceil(rest / min(R[:d])))
    lemmas = []
    for m in range(least, max(least, vocab_size - d) + 1):
        bits = lumped + rest * math.log2(m)
        lemmas.append(Lemma(d, m, bits, (math.log2(d + m) + math.log2(size + 1)) / bits))
    return min(lemmas, key=lambda lemma: lemma.bound)


def channel_bounds(kl_bits: float) -> tuple[float, float]:
    """ERSD, eqs. (6) and (8): from D = KL(target, draft), the least and the most that H[R] of ERSD
    can be, in bits.

    GSD has the same lower bound, and eq. (7), D + (1 + e) log(D + 1) + O(1), with a constant that
    the paper does not give.
    """
    return kl_bits, kl_bits + math.log2(kl_bits + 1) + 4
