"""Checks for your own plans, methods and models. This library's own pass all of them.

    from spectr_jax import check_method, check_model, check_plan, get_method, transport

    check_plan(transport.get("mine"))  # seconds
    check_method(get_method("mine"))   # half a minute
    check_model(MyModel())             # seconds

Each raises an `AssertionError` that names the property that failed, where, and by how much. Each
property of a plan or method is also a function. Keys are fixed, so results are reproducible; a
correct plan or method fails by chance once in 18,000 cases.
"""

from spectr_jax.testing.methods import (
    check_compilations,
    check_counters,
    check_greedy,
    check_method,
    check_outputs,
    check_rows,
    count_compilations,
)
from spectr_jax.testing.models import check_model
from spectr_jax.testing.plans import (
    DISTRIBUTIONS,
    check_emitted_pmf,
    check_nonsense,
    check_plan,
    check_precision,
    check_select,
)

__all__ = [
    "DISTRIBUTIONS",
    "check_compilations",
    "check_counters",
    "check_emitted_pmf",
    "check_greedy",
    "check_method",
    "check_model",
    "check_nonsense",
    "check_outputs",
    "check_plan",
    "check_precision",
    "check_rows",
    "check_select",
    "count_compilations",
]
