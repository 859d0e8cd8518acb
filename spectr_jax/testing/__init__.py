"""The checks that every plan, method and model here passes, for those that you write.

    from spectr_jax import check_method, check_model, check_plan, get_method, transport

    check_plan(transport.get("mine"))  # seconds
    check_method(get_method("mine"))   # half a minute
    check_model(MyModel())             # seconds

Each raises `AssertionError`, which says what property failed, where and by how much. Each property
of a plan or a method is a function of its own too. Keys are fixed: what passes once passes always;
a right plan or method fails by chance once in 18,000 times.
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
