"""Checks of plans: one function per property, and `check_plan` for all of them."""

import functools
import re
from collections.abc import Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.testing import chi_square
from spectr_jax.transport.base import Choice, Plan
from spectr_jax.transport.types import ExactProbs
from spectr_jax.utils import registry
from spectr_jax.utils.errors import UserError

TOLERANCE = 1e-9
"""Tolerance of float64 results."""

_RNG = np.random.default_rng(0)
DISTRIBUTIONS = {
    "uniform": ([0.25] * 4, [0.25] * 4),
    "bernoulli": ([0.75, 0.25], [0.4, 0.6]),
    "dirichlet": (_RNG.dirichlet(np.ones(5)), _RNG.dirichlet(np.ones(5))),
    "rough": (_RNG.dirichlet(np.full(6, 0.3)), _RNG.dirichlet(np.full(6, 0.3))),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
    "equal": ([0.1, 0.2, 0.7], [0.1, 0.2, 0.7]),
    "q with zeros": ([0.2, 0.3, 0.5], [0.0, 0.6, 0.4]),
    "p with zeros": ([0.0, 0.6, 0.4], [0.2, 0.3, 0.5]),
    "one-hot p": ([0.0, 1.0, 0.0], [0.2, 0.3, 0.5]),
    "one-hot q": ([0.2, 0.3, 0.5], [0.0, 0.0, 1.0]),
    "nearly one-hot p": ([1 - 1e-9, 1e-9, 1e-12], [0.5, 0.3, 0.2]),
    "one-hot p but for rounding": ([1.0, 1e-20, 1e-25], [0.5, 0.3, 0.2]),
    "same one-hot": ([0.0, 1.0], [0.0, 1.0]),
    "other one-hot": ([0.0, 1.0], [1.0, 0.0]),
}
"""Pairs (p, q) of distributions on which plans are checked."""
DRAFTS = (1, 2, 3, 4)
"""Numbers of drafts k at which the emitted distribution is enumerated."""
DRAWS = 40_000
WIDEST = 6
"""Distributions are padded to this many tokens, so that `select` compiles once."""
VOCABULARIES = (WIDEST, 1_024)
"""Sizes of vocabularies: a plan may take another code path for large ones."""
VALID = ((False, False, False), (False, True, False), (True, False, True), (True, True, True))
"""Masks of valid drafts: 0, 1, 2 and 3 of three."""


def check_plan(plan: Plan) -> None:
    """Checks a plan on all `DISTRIBUTIONS`, with all checks of this module.

    Raises:
      AssertionError: the plan is wrong; the message says where.
      UserError: `plan` is not a plan.
    """
    if not isinstance(plan, Plan):
        raise UserError(f"plan={plan!r}: is not a Plan; give one, such as transport.get('kseq')")
    registry.check_equality(plan)
    for p, q in DISTRIBUTIONS.values():
        for k in DRAFTS:
            check_emitted_pmf(plan, p, q, k)
        check_select(plan, p, q)
    check_nonsense(plan)
    check_precision(plan)


def check_emitted_pmf(plan: Plan, p, q, k: int) -> None:
    """Checks `plan.pmf` and `plan.acceptance` by enumeration of all draws of k drafts from p [V].

    `pmf`, averaged over the drafts, must be q [V].

    Raises:
      AssertionError: one of these fails.
    """
    p, q = np.asarray(p, float), np.asarray(q, float)
    where = f"for p = {_text(p)}, q = {_text(q)} and k = {k}"
    drafts, _ = next(plan.rule.sequences(p, k))
    pmf = np.asarray(plan.pmf(p, q, drafts))
    if pmf.shape != q.shape or pmf.dtype != np.float64:
        found = f"{pmf.dtype} of shape {list(pmf.shape)}"
        _fail(plan, f"`pmf` returns an array of {found}, not float64 of {list(q.shape)}")
    emitted, accepted = emitted_pmf(plan, p, q, k)
    off = np.abs(emitted - q)
    if not off.max() <= TOLERANCE:
        _fail(
            plan,
            f"the emitted distribution is not q {where}: `pmf` averages over the drafts to "
            f"{_text(emitted)}, off by {off.max():.3g} at token {off.argmax()}",
        )
    acceptance = plan.acceptance(p, q, k)
    if not abs(acceptance - accepted) <= TOLERANCE:
        _fail(
            plan,
            f"the acceptance is wrong {where}: {acceptance:.9g}, by enumeration of `pmf` "
            f"{accepted:.9g}, off by {abs(acceptance - accepted):.3g}",
        )


def emitted_pmf(plan: Plan, p: ExactProbs, q: ExactProbs, k: int) -> tuple[ExactProbs, float]:
    """Returns the distribution [V] of the plan's token over all drafts, and its acceptance."""
    emitted, accepted = np.zeros(len(q)), 0.0
    for drafts, probability in plan.rule.sequences(p, k):
        pmf = plan.pmf(p, q, drafts)
        emitted += probability * pmf
        accepted += probability * pmf[list(set(drafts))].sum()
    return emitted, accepted


def check_select(plan: Plan, p, q, least: float = chi_square.LEAST) -> None:
    """Checks that `plan.select` draws from `plan.pmf` and reports correctly what it accepted.

    `select` runs under jit and vmap, with 0 to 3 drafts from p [V]. p-values below `least` fail.

    Raises:
      AssertionError: one of these fails.
    """
    p, q = (np.pad(np.asarray(pmf, float), (0, max(0, WIDEST - len(pmf)))) for pmf in (p, q))
    drawn, valid = _some_drafts(plan, p)
    padded = np.full(valid.shape, np.argmax(p))
    for live, drafts in enumerate(drawn):
        padded[live, valid[live]] = drafts
    keys = jax.random.split(jax.random.key(0), (len(valid), DRAWS))
    pmfs = (jnp.tile(jnp.float32(pmf), (len(valid), 1)) for pmf in (p, q))
    of_keys, usable = padded, np.ones(keys.shape, bool)
    if plan.rule.shares_key:
        of_keys, usable = _drawn(plan, keys, p, padded, valid)
    choices = jax.tree.map(np.asarray, _choose(plan, keys, *pmfs, of_keys, valid))
    if not np.issubdtype(choices.token.dtype, np.integer):
        _fail(plan, f"`select` returns a token of {choices.token.dtype}, not int32")
    for live, drafts in enumerate(drawn):
        tokens, accepted = (rows[live][usable[live]] for rows in choices)
        where = f"for p = {_text(p)}, q = {_text(q)} and {len(drafts)} valid drafts {drafts}"
        _check_tokens(plan, tokens, np.flatnonzero(q), where)
        _check_accepted(plan, tokens, accepted, drafts, where)
        counts = np.bincount(tokens, minlength=len(q))
        _check_drawn(plan, counts, plan.pmf(p, q, drafts) if drafts else q, where, least)


def check_nonsense(plan: Plan) -> None:
    """Checks that `plan.select` never chooses a token of probability 0 for invalid input under jit.

    Raises:
      AssertionError: it does, or `accepted` is wrong.
    """
    rng = np.random.default_rng(2)
    shape = 8, len(VALID), len(VALID[0])
    ps, qs = rng.dirichlet(np.ones(WIDEST), (2, *shape[:2]))
    for pmfs in (ps, qs):
        pmfs[rng.random(pmfs.shape) < 0.2] = 0
        pmfs[rng.random(pmfs.shape) < 0.1] = np.nan
        pmfs[rng.random(pmfs.shape) < 0.1] *= -3
    ps[0, 0], qs[0, 1] = 0, np.nan
    all_drafts, all_valid = rng.integers(-2, WIDEST + 2, shape), rng.random(shape) < 0.7
    keys = jax.random.split(jax.random.key(0), (len(VALID), DRAWS))
    for p, q, drafts, valid in zip(ps, qs, all_drafts, all_valid, strict=True):
        of_keys = np.repeat(drafts[:, None], DRAWS, axis=1) if plan.rule.shares_key else drafts
        choices = _choose(plan, keys, jnp.float32(p), jnp.float32(q), of_keys, valid)
        for row, (tokens, accepted) in enumerate(zip(*map(np.asarray, choices), strict=True)):
            these = drafts[row, valid[row]].tolist()
            usable = tuple(x for x in these if 0 <= x < WIDEST and p[row, x] > 0)
            where = f"under jit for p = {_text(p[row])}, q = {_text(q[row])} and usable drafts "
            where += f"{usable} of {these}"
            allowed = np.flatnonzero(q[row] > 0)
            _check_tokens(plan, tokens, allowed if len(allowed) else [-1], where)
            _check_accepted(plan, tokens, accepted, usable, where)


def check_precision(plan: Plan) -> None:
    """Checks that no matrix product in `plan.select` uses a backend's default precision.

    For float32 this default is bfloat16 on TPUs and TF32 on GPUs, which draws on a CPU do not show.
    Small and large vocabularies are checked.

    Raises:
      AssertionError: a product uses the default precision.
    """
    for V in VOCABULARIES:
        pmf, drafts = jnp.zeros(V), jnp.zeros(len(VALID[0]), jnp.int32)
        arguments = jax.random.key(0), pmf, pmf, drafts, drafts > 0
        program = jax.jit(plan.select).lower(*arguments).as_text()
        for product in re.findall(r"stablehlo\.dot_general[^\n]*f32>[^\n]*", program):
            if product.count("HIGHEST") < 2:
                _fail(
                    plan,
                    f"`select` multiplies matrices of float32 in default precision at V = {V}, "
                    "which TPUs and GPUs round to 8 or 11 bits; use `transport.base.product`, or "
                    "precision=jax.lax.Precision.HIGHEST",
                )


@functools.partial(jax.jit, static_argnums=0)
def _choose(plan: Plan, keys, p, q, drafts, valid) -> Choice:
    """Returns choices [R, D] for keys [R, D], p and q [R, V], drafts [R, k] and valid [R, k].

    If the rule shares its key, each key has its own drafts [R, D, k].
    """

    def select(key, *rest):
        return plan.select(jax.random.fold_in(key, 0), *rest)

    many = jax.vmap(select, (0, None, None, 0 if plan.rule.shares_key else None, None))
    return jax.vmap(many)(keys, p, q, jnp.int32(drafts), valid)


def _some_drafts(plan: Plan, p: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """Returns 0, 1, 2 and 3 drafts from p, or fewer if its support is smaller, and masks [4, 3]."""
    rng, valid = np.random.default_rng(1), np.array(VALID)
    drawn: list[tuple[int, ...]] = [()]
    for live in range(1, len(valid)):
        possible = list(plan.rule.sequences(p, live))
        drawn.append(possible[rng.choice(len(possible), p=[weight for _, weight in possible])][0])
        valid[live] &= np.cumsum(valid[live]) <= len(drawn[live])
    return drawn, valid


@functools.partial(jax.jit, static_argnums=0)
def _drawn(plan: Plan, keys, p, wanted, valid) -> tuple[jax.Array, jax.Array]:
    """Returns the drafts [R, D, k] that each key draws from p [V], and if they are `wanted`."""

    def one(key, wanted, valid):
        p_1xV, counts = p.astype(jnp.float32)[None], np.array(valid.shape)
        order = plan.rule.draw(jax.random.fold_in(key, 0), p_1xV, counts)[0]
        drafts = jnp.where(valid, order[jnp.cumsum(valid) - 1], wanted)
        return drafts, jnp.all(drafts == wanted)

    return jax.vmap(jax.vmap(one, (0, None, None)))(keys, wanted, valid)


def _check_tokens(plan: Plan, tokens: np.ndarray, allowed, where: str) -> None:
    wrong = tokens[~np.isin(tokens, allowed)]
    if len(wrong):
        count = f"{len(wrong)} of {len(tokens)} times"
        _fail(plan, f"`select` emits token {wrong[0]}, which has probability 0, {count} {where}")


def _check_accepted(
    plan: Plan, tokens: np.ndarray, accepted: np.ndarray, drafts: Sequence[int], where: str
) -> None:
    wrong = np.flatnonzero(accepted != np.isin(tokens, drafts))
    if len(wrong):
        token = tokens[wrong[0]]
        _fail(plan, f"`select` says accepted = {accepted[wrong[0]]} of token {token} {where}")


def _check_drawn(plan: Plan, counts: np.ndarray, pmf: np.ndarray, where: str, least: float) -> None:
    if not (abs(pmf.sum() - 1) <= TOLERANCE and pmf.min() >= -TOLERANCE):
        _fail(plan, f"`pmf` returns {_text(pmf)}, which is not a distribution, {where}")
    # Float32 rounding may add mass where the distribution given these drafts has none.
    impossible = counts[pmf <= 1e-12].sum() > 2e-4 * counts.sum()
    p_value = chi_square.p_value(counts, np.maximum(pmf, 0))
    if counts.sum() <= 100 or impossible or not p_value >= least:
        seen = counts / max(1, counts.sum())
        off = np.abs(seen - pmf)
        _fail(
            plan,
            f"`select` does not draw from `pmf` {where}: {_text(seen)} in {counts.sum():,} draws, "
            f"`pmf` gives {_text(pmf)}, off by {off.max():.3g} at token {off.argmax()} "
            f"(chi-square: p-value {p_value:.1g})",
        )


def _text(pmf: np.ndarray) -> str:
    return f"[{', '.join(f'{x:.4g}' for x in pmf)}]"


def _fail(plan: Plan, message: str) -> NoReturn:
    raise AssertionError(f"plan {plan.name!r}: {message}")
