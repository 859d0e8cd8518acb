"""Evenly spread uniforms: a randomly shifted lattice (Cranley and Patterson, 1976)."""

import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from spectr_jax.transport.draws import uniform


def uniforms(
    key: PRNGKeyArray, shape: tuple[int, int], draws: int
) -> Float[Array, "rows columns draws"]:
    """Returns uniforms [*shape, draws]: independent within a draw, evenly spread over the draws.

    Consumes `key`.
    """
    steps = np.sqrt(_primes(shape[0] * shape[1])).reshape(*shape, 1) * np.arange(draws) % 1
    return (uniform(key, (*shape, 1)) + steps.astype(np.float32)) % 1


def _primes(count: int) -> Int[np.ndarray, " {count}"]:
    """Returns the first `count` prime numbers."""
    limit = 20 + int(1.5 * count * np.log(count + 2))
    sieve = np.ones(limit, bool)
    sieve[:2] = False
    for factor in range(2, int(limit**0.5) + 1):
        sieve[factor * factor :: factor] = False
    return np.flatnonzero(sieve)[:count]
