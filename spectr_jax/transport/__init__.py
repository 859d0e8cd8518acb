"""Transport plans: given k drafts from p, a plan emits one token distributed as q.

`get(name)` returns a plan. Each plan is a file that names its paper, theorem and algorithm.
"""

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
"""The ways to draw drafts; see `Plan.drafts`."""


@runtime_checkable
class PlanFunctions(Protocol):
    """A module, or any object, with the functions of a plan; `Plan` has methods of the same names.

    All take the plan's options as keyword-only arguments with defaults. Two more attributes are
    optional: `DRAFTS`, one of `RULES`, if the drafts are not i.i.d.; and `win`, if the plan names
    a winner among them (`spectr_jax.transport.winner`).
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
"""The module of each plan, by name."""


def register(name: str, plan: PlanFunctions) -> None:
    """Adds your own plan under an unused `name`, so that `get(name)` returns it.

    `spectr_jax.testing.check_plan(get(name))` checks that it is exact.

    Raises:
      UserError: the name is taken, a function is missing, or `DRAFTS` is not one of `RULES`.
    """
    if name in PLANS:
        raise UserError(f"name={name!r}: a plan has this name; choose another")
    for function in ("select", "pmf", "acceptance"):
        if not callable(getattr(plan, function, None)):
            raise UserError(f"plan {name!r}: has no function {function!r}; define it")
    drafts = getattr(plan, "DRAFTS", "iid")
    if drafts not in RULES:
        raise unknown(f"DRAFTS of plan {name!r}:", drafts, RULES)
    PLANS[name] = plan


def get(name: str, **options: Any) -> Plan:
    """Returns the plan `name` with `options` bound to its functions.

    Raises:
      UserError: the plan or an option is unknown.
    """
    if not isinstance(name, str) or name not in PLANS:
        raise unknown("plan", name, PLANS)
    plan = PLANS[name]
    parameters = inspect.signature(plan.select).parameters.values()
    known = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            has = ", ".join(known) or "none"
            raise UserError(f"plan {name!r} has no option {option!r}; it has {has}")
    functions = plan.select, plan.pmf, plan.acceptance
    drafts, winner = getattr(plan, "DRAFTS", "iid"), getattr(plan, "win", None)
    return Plan(name, tuple(sorted(options.items())), functions, drafts, winner)
