"""Zeros in place of what a function would return."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")


def zeros_like_output(function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns what `function(*arguments)` returns, with zeros in place of the values and without computing them."""
    zeros: Result = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *arguments)
    )
    return zeros
