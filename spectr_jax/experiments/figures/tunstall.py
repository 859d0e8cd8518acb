"""Bounds on the tokens per call of optimal trees, from Tunstall codes (ERSD, section 4).

Entropies are in bits. R [C] is the acceptance by child index, which descends.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spectr_jax.decoding.tree import optimal_order


def entropy(R: Sequence[float]) -> float:
    """Returns a lower bound of the entropy H[R] of acceptance by child index.

    The missing mass 1 - sum R counts as one more index.
    """
    pmf = np.append(np.asarray(R, float), max(1 - float(np.sum(R)), 0.0))
    pmf = pmf[pmf > 0]
    return float(-np.sum(pmf * np.log2(pmf)))


def theorem_4_1(R: Sequence[float], vocab_size: int, size: int) -> float:
    """Returns the bound on the tokens per call of any tree of N = `size` nodes.

    Source: ERSD, Theorem 4.1: (log V + log(N + 1)) / H[R].
    """
    return (math.log2(vocab_size) + math.log2(size + 1)) / entropy(R)


class Lemma(NamedTuple):
    """ERSD, Lemma 4.2 at some d and m."""

    d: int  # Number of child indices that the optimal tree explores.
    m: int  # Number of further indices, which share the rest of R evenly.
    bits: float  # Entropy of this distribution over d + m indices.

    def bound(self, size: int) -> float:
        """Returns the bound on the tokens per call of trees of N = `size` nodes that explore at
        most d indices."""
        return (math.log2(self.d + self.m) + math.log2(size + 1)) / self.bits


def lemma_4_2(R: Sequence[float], size: int, vocab_size: int) -> Lemma:
    """Returns ERSD's Lemma 4.2 with the d and m that give trees of N = `size` nodes the lowest
    bound."""
    d = max(max(node) for node in optimal_order(R, size)) + 1
    rest = max(1 - float(np.sum(R[:d])), 0.0)
    least = max(1, math.ceil(rest / min(R[:d])))
    bits, most = entropy(R[:d]), max(least, vocab_size - d)
    lemmas = (Lemma(d, m, bits + rest * math.log2(m)) for m in range(least, most + 1))
    return min(lemmas, key=lambda lemma: lemma.bound(size))


def channel_bounds(kl_bits: float) -> tuple[float, float]:
    """Returns the lower and the upper bound of ERSD's H[R], in bits, from D = KL(target, draft).

    Source: ERSD, eqs. (6) and (8). GSD has the same lower bound. Its upper bound, eq. (7),
    D + (1 + e) log(D + 1) + O(1), has a constant that the paper does not give.
    """
    return kl_bits, kl_bits + math.log2(kl_bits + 1) + 4
