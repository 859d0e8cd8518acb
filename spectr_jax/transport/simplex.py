"""A dense simplex method for tiny linear programs, inside jit and vmap: what SpecTr++ solves at
each node.

JAX has no linear programming, and a host call a node would cost more than the program. For a few
variables and a few dozen constraints a tableau of floats and one rank-one update a pivot is all
there is to do.
"""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spectr_jax.transport.types import BoolScalar, IntScalar

PIVOTS = 100
"""At most; programs with 16 variables take about 10 to 30."""

_Carry: TypeAlias = tuple[
    Float[Array, "rows columns"], Int[Array, " m"], Int[Array, " n"], IntScalar
]


def tolerance(dtype: Any) -> float:
    """Returns what counts as 0: 1e-11 in float64, 1e-5 in float32."""
    small: float = float(jnp.finfo(dtype).eps) ** 0.7
    return small


def maximise(
    gain: Float[Array, " n"], rows: Float[Array, "m n"], bounds: Float[Array, " m"]
) -> Float[Array, " n"]:
    """Returns the x [n] >= 0 with `rows @ x <= bounds` and the largest `gain @ x`.

    Dantzig's rule from the feasible x = 0. Every step stays feasible, up to rounding, also when the
    limit on steps ends it early. On ill-conditioned programs in float32 rounding may be large:
    callers that need a feasible x check it.

    Args:
      gain: [n]
      rows: [m, n]
      bounds: [m], at least 0.
    """
    m, n = rows.shape
    # Dictionary form: each row a basic variable in terms of the others; the last row is the gain,
    # the last column values.
    table = jnp.block([[rows, bounds[:, None]], [-gain[None, :], jnp.zeros((1, 1), rows.dtype)]])
    small = tolerance(rows.dtype)  # A pivot on less would be one on rounding errors.

    def improvable(carry: _Carry) -> BoolScalar:
        table, _, _, steps = carry
        return jnp.any(table[-1, :-1] < -small) & (steps < PIVOTS)

    def pivot(carry: _Carry) -> _Carry:
        table, basic, free, steps = carry
        column = jnp.argmin(table[-1, :-1])
        slopes = table[:-1, column]
        ratios = jnp.where(
            slopes > small,
            jnp.maximum(table[:-1, -1], 0) / jnp.where(slopes > small, slopes, 1),
            jnp.inf,
        )
        row = jnp.argmin(ratios)
        bounded = jnp.isfinite(ratios[row])
        at = table[row, column]
        scaled = table[row] / at
        updated = (
            (table - jnp.outer(table[:, column], scaled)).at[:, column].set(-table[:, column] / at)
        )
        updated = updated.at[row].set(scaled).at[row, column].set(1 / at)
        swapped = basic.at[row].set(free[column]), free.at[column].set(basic[row])
        return (
            jnp.where(bounded, updated, table),
            jnp.where(bounded, swapped[0], basic),
            jnp.where(bounded, swapped[1], free),
            jnp.where(bounded, steps + 1, PIVOTS),  # No bound in that direction: stop where we are.
        )

    start = table, n + jnp.arange(m), jnp.arange(n), jnp.int32(0)
    table, basic, _, _ = jax.lax.while_loop(improvable, pivot, start)
    return jnp.zeros(n + m, rows.dtype).at[basic].set(jnp.maximum(table[:-1, -1], 0))[:n]
