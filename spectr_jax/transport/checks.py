"""Checks of the arguments of a plan. Each error names the value and the remedy."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int
from numpy.typing import ArrayLike

from spectr_jax.transport.types import ExactProbs
from spectr_jax.utils.errors import UserError

TOLERANCE = 1e-3
"""How far the sum of a distribution may be from 1; float32 sums over large vocabularies are that
rough."""


def known(*arrays: object) -> bool:
    """Returns whether all values are concrete, not traced by JAX."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)


def check_distributions(p: ArrayLike, q: ArrayLike) -> tuple[ExactProbs, ExactProbs]:
    """Returns p [V] and q [V] in float64, normalised; raises `UserError` unless both are
    distributions on one vocabulary."""
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    for name, pmf in (("p", p), ("q", q)):
        if pmf.ndim != 1 or not len(pmf):
            raise UserError(
                f"{name} has shape {pmf.shape}; give one distribution [V], and vmap for more"
            )
        wrong = np.flatnonzero(~(np.isfinite(pmf) & (pmf >= 0)))
        if len(wrong):
            raise UserError(
                f"{name}[{wrong[0]}] is {pmf[wrong[0]]}; probabilities are finite and at least 0"
            )
        if abs(pmf.sum() - 1) > TOLERANCE:
            raise UserError(f"{name} sums to {pmf.sum():.6g}, not 1; divide it by its sum")
    if len(p) != len(q):
        raise UserError(f"p has {len(p)} tokens and q has {len(q)}; use one vocabulary for both")
    return p / p.sum(), q / q.sum()


def check_number(k: int | float) -> int:
    """Returns the number of drafts; raises `UserError` unless it is at least 1."""
    if isinstance(k, bool) or int(k) != k or k < 1:
        raise UserError(f"k={k} drafts; give a whole number of at least 1")
    return int(k)


def check_whole(drafts: ArrayLike | Sequence[int]) -> None:
    """Raises `UserError` unless drafts that are not arrays of JAX are whole numbers within
    int32."""
    if isinstance(drafts, jax.Array) or (
        isinstance(drafts, Sequence) and any(isinstance(each, jax.Array) for each in drafts)
    ):
        return
    array = np.asarray(drafts)
    if array.size and (
        array.dtype.kind not in "iu" or np.any((array < -(2**31)) | (array >= 2**31))
    ):
        raise UserError(f"drafts={drafts!r:.60}: must be whole numbers within int32; give tokens")


def check_drafts(
    p: ExactProbs, drafts: Sequence[int] | Int[np.ndarray, " k"], rule: str
) -> tuple[int, ...]:
    """Returns the drafts as a tuple; raises `UserError` if there are none or if they cannot come
    from p by `rule`."""
    check_whole(drafts)
    drafts = tuple(int(draft) for draft in drafts)
    if not drafts:
        raise UserError("k=0: no valid draft; give at least one, or draw from q itself")
    for draft in drafts:
        if not 0 <= draft < len(p):
            raise UserError(
                f"draft {draft} is outside the vocabulary 0..{len(p) - 1}; use the tokenizer of p"
            )
        if p[draft] == 0:
            raise UserError(f"draft {draft} has p = 0; give drafts that were drawn from p")
    if rule != "iid" and len(set(drafts)) < len(drafts):
        raise UserError(f"drafts {drafts} repeat a token; this plan is for distinct drafts")
    if (
        rule == "greedy"
        and len(drafts) > 1
        and min(p[list(drafts[:-1])]) < max(np.delete(p, drafts[:-1]), default=0)
    ):
        raise UserError(
            f"drafts {drafts[:-1]} are not the {len(drafts) - 1} likeliest tokens of p; draft "
            "greedily"
        )
    return drafts
