"""Transport plans: k drafts from p, one token from q. `get(name)` returns a plan; each file names
its source."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from spectr_jax.transport import (
    greedy,
    greedy_multipath,
    kseq,
    kseq_gamma,
    maximal,
    naive,
    optimal_kseq,
    otm,
    otm_lp,
    race,
    recursive,
    recursive_without_replacement,
    spectr_plus,
    spectr_plus_plus,
)
from spectr_jax.transport.base import Choice, Plan
from spectr_jax.transport.bounds import (
    harmonic_bound,
    optimal_acceptance,
    theorem_1_bound,
    total_variation,
)
from spectr_jax.transport.types import ExactProbs
from spectr_jax.utils.errors import UserError, unknown

__all__ = [
    "PLANS",
    "RULES",
    "Choice",
    "Plan",
    "PlanFunctions",
    "get",
    "harmonic_bound",
    "optimal_acceptance",
    "register",
    "theorem_1_bound",
    "total_variation",
]

RULES = ("iid", "without_replacement", "race", "greedy")
"""How drafts can be drawn; see `Plan.drafts`."""


@runtime_checkable
class PlanFunctions(Protocol):
    """What defines a plan: a module, or any object, with these functions; see the methods of `Plan`
    of the same names.

    All take the plan's options as keyword-only arguments with defaults. Besides, there may be
    `DRAFTS`, one of `RULES` where the drafts are not to be i.i.d., and `win` where the plan names a
    winner among them (`spectr_jax.transport.winner`).
    """

    @property
    def select(self) -> Callable[..., Choice]: ...

    @property
    def pmf(self) -> Callable[..., ExactProbs]: ...

    @property
    def acceptance(self) -> Callable[..., float]: ...


PLANS: dict[str, PlanFunctions] = {
    "maximal": maximal,
    "naive": naive,
    "kseq": kseq,
    "kseq_gamma": kseq_gamma,
    "spectr+": spectr_plus,
    "spectr++": spectr_plus_plus,
    "optimal_kseq": optimal_kseq,
    "otm": otm,
    "otm_lp": otm_lp,
    "greedy_multipath": greedy_multipath,
    "recursive": recursive,
    "recursive_without_replacement": recursive_without_replacement,
    "greedy": greedy,
    "race": race,
}
"""The functions of each plan, by name: a module each."""


def register(name: str, plan: PlanFunctions) -> None:
    """Adds a plan of your own, so that `get(name)` returns it.

    `spectr_jax.testing.check_plan(get(name))` says whether it is exact.

    Args:
      name: not taken yet.
      plan: a module or any object with functions `select`, `pmf` and `acceptance`; see
        `PlanFunctions`.

    Raises:
      UserError: the name is taken, a function is missing, or `DRAFTS` is none of `RULES`.
    """
    if name in PLANS:
        raise UserError(f"plan {name!r} is there already; choose another name")
    for function in ("select", "pmf", "acceptance"):
        if not callable(getattr(plan, function, None)):
            raise UserError(
                f"plan {name!r} has no function {function!r}; give select, pmf and acceptance"
            )
    drafts = getattr(plan, "DRAFTS", "iid")
    if drafts not in RULES:
        raise unknown(f"rule DRAFTS of plan {name!r},", drafts, RULES)
    PLANS[name] = plan


def get(name: str, **options: Any) -> Plan:
    """Returns the plan `name` with `options` bound to its functions.

    Raises:
      UserError: an unknown plan, or an option that it does not have.
    """
    if not isinstance(name, str) or name not in PLANS:
        raise unknown("plan", name, PLANS)
    plan = PLANS[name]
    parameters = inspect.signature(plan.select).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            raise UserError(
                f"plan {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}"
            )
    functions = plan.select, plan.pmf, plan.acceptance
    drafts, winner = getattr(plan, "DRAFTS", "iid"), getattr(plan, "win", None)
    return Plan(name, tuple(sorted(options.items())), functions, drafts, winner)
