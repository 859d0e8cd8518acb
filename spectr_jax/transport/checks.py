"""Checks of a plan's arguments."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from spectr_jax.transport.rules import Rule
from spectr_jax.transport.types import ExactProbs
from spectr_jax.utils.errors import UserError

TOLERANCE = 1e-3
"""Largest allowed distance of a sum from 1. Float32 sums over large vocabularies need it."""


def check_distributions(p: ArrayLike, q: ArrayLike) -> tuple[ExactProbs, ExactProbs]:
    """Returns p [V] and q [V] in float64, normalised.

    Raises:
      UserError: p or q is not a distribution, or their sizes differ.
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    for name, pmf in (("p", p), ("q", q)):
        if pmf.ndim != 1 or not len(pmf):
            raise UserError(f"{name}: has shape {pmf.shape}; give one distribution [V], or vmap")
        wrong = np.flatnonzero(~(np.isfinite(pmf) & (pmf >= 0)))
        if len(wrong):
            value = f"{name}[{wrong[0]}]={pmf[wrong[0]]}"
            raise UserError(f"{value}: must be finite and at least 0; give probabilities")
        if abs(pmf.sum() - 1) > TOLERANCE:
            raise UserError(f"{name}: sums to {pmf.sum():.6g}, not 1; divide it by its sum")
    if len(p) != len(q):
        raise UserError(f"p has {len(p)} tokens and q has {len(q)}; use one vocabulary for both")
    return p / p.sum(), q / q.sum()


def check_number(k: int | float) -> int:
    """Returns the number of drafts; raises `UserError` unless it is a positive integer."""
    if isinstance(k, bool | str) or not (k >= 1 and k % 1 == 0):  # inf % 1 is NaN.
        raise UserError(f"k={k}: must be a positive integer; give a number of drafts")
    return int(k)


def check_whole(drafts: ArrayLike | Sequence[int]) -> None:
    """Raises `UserError` unless `drafts` holds integers within int32. Skips JAX arrays."""
    parts = drafts if isinstance(drafts, Sequence) else [drafts]
    if any(isinstance(part, jax.Array) for part in parts):
        return
    array = np.asarray(drafts)
    whole = array.dtype.kind in "iu" and np.all((array >= -(2**31)) & (array < 2**31))
    if array.size and not whole:
        raise UserError(f"drafts={drafts!r:.60}: must be integers within int32; give tokens")


def check_drafts(
    p: ExactProbs, drafts: Sequence[int] | Int[np.ndarray, " k"], rule: Rule
) -> tuple[int, ...]:
    """Returns the drafts as a tuple.

    Raises:
      UserError: there is no draft, or the drafts cannot come from p by `rule`.
    """
    check_whole(drafts)
    drafts = tuple(int(draft) for draft in drafts)
    if not drafts:
        raise UserError("drafts=(): no valid draft; give at least one, or draw from q itself")
    for draft in drafts:
        if not 0 <= draft < len(p):
            last = len(p) - 1
            raise UserError(f"draft={draft}: is outside 0..{last}; use the tokenizer of p")
        if p[draft] == 0:
            raise UserError(f"draft={draft}: has p = 0; give drafts that were drawn from p")
    rule.check(p, drafts)
    return drafts
