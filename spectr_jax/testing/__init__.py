"""The exactness checks that every plan and every method here passes, for those that you write.

    from spectr_jax import decoding, testing, transport

    testing.check_plan(transport.get("mine"))          # seconds
    testing.check_method(decoding.get_method("mine"))  # half a minute

Each raises `AssertionError`, which says what property failed, where and by how much. Each property is a function of its own
too. Keys are fixed: what passes once passes always; a right plan or method fails by chance once in 18,000 times.
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
from spectr_jax.testing.plans import (
    LAWS,
    check_emitted_law,
    check_nonsense,
    check_plan,
    check_precision,
    check_select,
)

__all__ = [
    "LAWS",
    "check_compilations",
    "check_counters",
    "check_emitted_law",
    "check_greedy",
    "check_method",
    "check_nonsense",
    "check_outputs",
    "check_plan",
    "check_precision",
    "check_rows",
    "check_select",
    "count_compilations",
]
