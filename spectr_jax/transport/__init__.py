"""Transport plans: k drafts from p, one token from q. `get(name)` returns a plan; each file names its source."""

from types import ModuleType
from typing import Any

from spectr_jax.errors import UserError, unknown
from spectr_jax.transport import kseq, maximal, otm
from spectr_jax.transport.base import Choice, Plan

__all__ = ["PLANS", "Choice", "Plan", "get"]

PLANS: dict[str, ModuleType] = {
    "maximal": maximal,
    "kseq": kseq,
    "otm": otm,
}
"""A module each, with functions `select`, `law` and `acceptance`."""


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
    return Plan(name, tuple(sorted(options.items())), (module.select, module.law, module.acceptance))
