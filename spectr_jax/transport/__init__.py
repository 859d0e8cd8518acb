"""Transport plans: k drafts from p, one token from q. `get(name)` returns a plan; each file names its source."""

from types import ModuleType
from typing import Any

from spectr_jax.errors import UserError, unknown
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
from spectr_jax.transport.bounds import harmonic_bound, optimal_acceptance, theorem_1_bound, total_variation

__all__ = [
    "PLANS",
    "Choice",
    "Plan",
    "get",
    "harmonic_bound",
    "optimal_acceptance",
    "theorem_1_bound",
    "total_variation",
]

PLANS: dict[str, ModuleType] = {
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
"""A module each, with functions `select`, `law` and `acceptance`; DRAFTS where these are not to be i.i.d.; `win` if any."""


def get(name: str, **options: Any) -> Plan:
    """The plan `name`, with `options` bound to its functions.

    Raises:
      UserError: an unknown plan, or an option that it does not have.
    """
    if name not in PLANS:
        raise unknown("plan", name, PLANS)
    module = PLANS[name]
    known = module.select.__kwdefaults__ or {}
    for option in options:
        if option not in known:
            raise UserError(f"plan {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    functions = module.select, module.law, module.acceptance
    drafts, winner = getattr(module, "DRAFTS", "iid"), getattr(module, "win", None)
    return Plan(name, tuple(sorted(options.items())), functions, drafts, winner)
