"""Zeros of the shape of a function's output."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")


def zeros_like_output(function: Callable[..., Result], *arguments: Any) -> Result:
    """Returns zeros of the shapes and dtypes of `function(*arguments)`, which is not computed."""
    output = jax.eval_shape(function, *arguments)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), output)
