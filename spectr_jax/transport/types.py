"""Types of arrays: `Probs` and `DraftTokens` of JAX, and `ExactProbs` of NumPy in float64."""

from typing import TypeAlias

import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, Shaped

Key: TypeAlias = PRNGKeyArray
Probs: TypeAlias = Float[Array, " vocab"]
DraftTokens: TypeAlias = Int[Array, " k"]
Valid: TypeAlias = Bool[Array, " k"]
Scalar: TypeAlias = Shaped[Array, ""]
ExactProbs: TypeAlias = Float[np.ndarray, " vocab"]

BoolScalar: TypeAlias = Bool[Array, ""]
FloatScalar: TypeAlias = Float[Array, ""]
IntScalar: TypeAlias = Int[Array, ""]
