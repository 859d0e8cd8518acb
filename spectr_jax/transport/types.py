"""Types of arrays: `Probs` and `Drafts` of JAX, and `ExactProbs` of NumPy in float64."""

from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

Key: TypeAlias = PRNGKeyArray
Probs: TypeAlias = Float[Array, " vocab"]
Drafts: TypeAlias = Int[Array, " k"]
Valid: TypeAlias = Bool[Array, " k"]

ExactProbs: TypeAlias = Float[np.ndarray, " vocab"]

BoolScalar: TypeAlias = Bool[Array, ""]
FloatScalar: TypeAlias = Float[Array, ""]
IntScalar: TypeAlias = Int[Array, ""]
Number: TypeAlias = int | float | IntScalar | FloatScalar
"""A number of Python or NumPy, or a traced one."""

AnyArray: TypeAlias = Any
"""An array of NumPy or JAX, in code that is written once for both."""
