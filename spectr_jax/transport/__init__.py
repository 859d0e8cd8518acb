"""Transport plans: given k drafts from p, a plan emits one token distributed as q.

`get(name)` returns a plan. The file of each plan names its paper, theorem and algorithm.
"""

from collections.abc import Callable
from typing import Any

from numpy.typing import ArrayLike

from spectr_jax.transport import rules
from spectr_jax.transport.base import Choice, Plan
from spectr_jax.transport.greedy import Greedy
from spectr_jax.transport.greedy_multipath import GreedyMultiPath
from spectr_jax.transport.iopt import OptimalKSeq
from spectr_jax.transport.kseq import KSeq
from spectr_jax.transport.maximal import Maximal
from spectr_jax.transport.naive import Naive
from spectr_jax.transport.otm import OTM
from spectr_jax.transport.race import Race
from spectr_jax.transport.recursive import Recursive, RecursiveWithoutReplacement
from spectr_jax.transport.spectr_plus_plus import SpecTrPlus, SpecTrPlusPlus
from spectr_jax.transport.winner import WinnerPlan
from spectr_jax.utils import registry
from spectr_jax.utils.errors import UserError

__all__ = [
    "PLANS",
    "Choice",
    "Plan",
    "WinnerPlan",
    "get",
    "optimal_acceptance",
    "register",
    "rules",
]

PLANS: dict[str, Callable[..., Plan]] = {
    "maximal": Maximal,
    "naive": Naive,
    "kseq": KSeq,
    "spectr+": SpecTrPlus,
    "spectr++": SpecTrPlusPlus,
    "optimal_kseq": OptimalKSeq,
    "otm": OTM,
    "greedy_multipath": GreedyMultiPath,
    "recursive": Recursive,
    "recursive_without_replacement": RecursiveWithoutReplacement,
    "greedy": Greedy,
    "race": Race,
}
"""The class of each plan, by name."""


def register(name: str, plan: Callable[..., Plan]) -> None:
    """Adds your own plan under an unused `name`, so that `get(name, **options)` returns it.

    `plan` is a class that inherits from `Plan`, or a function of keyword options that returns a
    plan. `spectr_jax.testing.check_plan(get(name))` checks that it is exact.

    Raises:
      UserError: the name is taken, or `plan` is neither, or a method is missing.
    """
    registry.check_free(Plan, PLANS, name)
    if not callable(plan) or (isinstance(plan, type) and not issubclass(plan, Plan)):
        wanted = "must be a class that inherits from Plan, or a function that returns a Plan"
        raise UserError(f"plan {name!r}: {plan!r:.60}: {wanted}")
    for missing in sorted(getattr(plan, "__abstractmethods__", ())):
        raise UserError(f"plan {name!r}: has no function {missing!r}; define it")
    PLANS[name] = plan


def get(name: str, **options: Any) -> Plan:
    """Returns the plan `name` with `options`.

    Raises:
      UserError: the plan or an option is unknown, or an option is out of range.
    """
    plan = registry.make(Plan, PLANS, name, options)  # type: ignore[type-abstract]
    object.__setattr__(plan, "name", name)  # Plans are frozen, and have the name of their entry.
    return plan


def optimal_acceptance(p: ArrayLike, q: ArrayLike, k: int | float) -> float:
    """Returns alpha_k(p, q), the largest acceptance of any plan for k i.i.d. drafts (see `otm`).

    Takes O(V log V) time, in float64.

    Raises:
      UserError: p or q is not a distribution, their sizes differ, or k is not a positive integer.
    """
    return get("otm").acceptance(p, q, k)
