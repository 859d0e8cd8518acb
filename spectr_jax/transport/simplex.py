"""A dense simplex method under jit and vmap, for the tiny linear programs of SpecTr++.

JAX has no linear programming, and one host call per node would take longer than the program. For a
few variables and a few dozen constraints, a pivot is one rank-one update of a dense tableau.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spectr_jax.transport.types import Scalar

PIVOTS = 100
"""The largest number of pivots. Programs with 16 variables take about 10 to 30."""


def tolerance(dtype: Any) -> float:
    """Returns the tolerance below which numbers count as 0: 1e-11 in float64, 1e-5 in float32."""
    return float(jnp.finfo(dtype).eps) ** 0.7


def maximise(
    gain: Float[Array, " n"], rows: Float[Array, "m n"], bounds: Float[Array, " m"]
) -> Float[Array, " n"]:
    """Returns the x [n] >= 0 with `rows @ x <= bounds` and the largest `gain @ x`.

    Starts at x = 0, which is feasible because `bounds` are at least 0, and follows Dantzig's rule.
    Up to rounding x stays feasible, even if the limit on pivots ends the search. In float32 the
    rounding is large for ill-conditioned programs: callers that need a feasible x must check it.
    """
    m, n = rows.shape
    # Each row has a basic variable in terms of the others. The last row is the gain, and the last
    # column has the values.
    table = jnp.block([[rows, bounds[:, None]], [-gain[None, :], jnp.zeros((1, 1), rows.dtype)]])
    small = tolerance(rows.dtype)  # Smaller pivots are rounding errors.

    def improvable(carry: Any) -> Scalar:
        table, _, _, steps = carry
        return jnp.any(table[-1, :-1] < -small) & (steps < PIVOTS)

    def pivot(carry: Any) -> Any:
        table, basic, free, steps = carry
        column = jnp.argmin(table[-1, :-1])
        slopes = table[:-1, column]
        limits = jnp.maximum(table[:-1, -1], 0) / jnp.where(slopes > small, slopes, 1)
        ratios = jnp.where(slopes > small, limits, jnp.inf)
        row = jnp.argmin(ratios)
        bounded = jnp.isfinite(ratios[row])
        at = table[row, column]
        scaled = table[row] / at
        updated = table - jnp.outer(table[:, column], scaled)
        updated = updated.at[:, column].set(-table[:, column] / at)
        updated = updated.at[row].set(scaled).at[row, column].set(1 / at)
        swapped = basic.at[row].set(free[column]), free.at[column].set(basic[row])
        # Without a bound in this direction the search stops at the current x.
        further, stopped = (updated, *swapped, steps + 1), (table, basic, free, PIVOTS)
        return tuple(jnp.where(bounded, *pair) for pair in zip(further, stopped, strict=True))

    start = table, n + jnp.arange(m), jnp.arange(n), jnp.int32(0)
    table, basic, _, _ = jax.lax.while_loop(improvable, pivot, start)
    return jnp.zeros(n + m, rows.dtype).at[basic].set(jnp.maximum(table[:-1, -1], 0))[:n]
