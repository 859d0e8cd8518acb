"""Functions of logits for `Policy(process=...)`; the outputs follow the processed distribution.

A process is a pure JAX function of (logits [V], tokens [T], length) for one position of one
sequence, and returns logits [V]; -inf excludes a token. The first `length` entries of `tokens` are
the tokens before the position, prompt included; the others are 0. In a draft tree, each node has
the tokens of its own path. T may differ between calls.

The processes below are pytrees, so another penalty compiles nothing. Write your own in the same
way, or as a plain function; JAX compiles once for each function object.
"""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spectr_jax.decoding.policy import Process
from spectr_jax.decoding.tree import NodeTokens, PerRow, Tokens, Tree
from spectr_jax.transport.types import FloatScalar, IntScalar
from spectr_jax.utils.errors import UserError

_LARGEST = float(np.finfo(np.float32).max)


Logits: TypeAlias = Float[Array, " vocab"]
Before: TypeAlias = Int[Array, " time"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Penalty:
    penalty: FloatScalar | np.float32

    def __call__(self, logits: Logits, tokens: Before, length: IntScalar) -> Array:
        places = jnp.where(jnp.arange(len(tokens)) < length, tokens, len(logits))
        occurs = jnp.zeros(len(logits), bool).at[places].set(True, mode="drop")
        penalty = self.penalty.astype(logits.dtype)
        return jnp.where(occurs, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Bias:
    tokens: Int[Any, " tokens"]
    values: Float[Any, " tokens"]

    def __call__(self, logits: Logits, tokens: Before, length: IntScalar) -> Array:
        return logits.at[self.tokens].add(self.values.astype(logits.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Only:
    tokens: Int[Any, " tokens"]

    def __call__(self, logits: Logits, tokens: Before, length: IntScalar) -> Array:
        allowed = jnp.zeros(len(logits), bool).at[self.tokens].set(True)
        return jnp.where(allowed, logits, -jnp.inf)


def repetition_penalty(penalty: float) -> Process:
    """Returns a process that makes repetitions less likely (more likely if `penalty` < 1).

    For tokens that occur in the sequence, prompt included, it divides positive logits by `penalty`
    and multiplies the others by it. Source: Keskar et al., 2019, arXiv 1909.05858.

    Raises:
      UserError: the penalty is not a positive number in float32.
    """
    tiny = float(np.finfo(np.float32).tiny)
    if not isinstance(penalty, numbers.Real) or not tiny <= penalty <= _LARGEST:
        raise UserError(f"penalty={penalty!r}: must be a positive number; try 1.2")
    return _Penalty(np.float32(penalty))


def bias(values: Mapping[int, float]) -> Process:
    """Returns a process that adds `values[token]` to the logit of each token; -inf bans a token.

    Raises:
      UserError: `values` is empty, or not {token: number}.
    """
    if not isinstance(values, Mapping) or not values:
        example = "{7: -float('inf')}"
        raise UserError(f"values={values!r:.60}: must map tokens to numbers, such as {example}")
    for value in values.values():
        is_number = isinstance(value, numbers.Real)
        if not is_number or not (value == -math.inf or abs(value) <= _LARGEST):
            raise UserError(f"values={value!r}: must be finite in float32, or -inf to ban a token")
    tokens = _whole(values)
    return _Bias(tokens, np.array([values[token] for token in tokens.tolist()], np.float32))


def only(tokens: Iterable[int]) -> Process:
    """Returns a process that excludes all tokens but these.

    Raises:
      UserError: there are none, or one is not a non-negative integer.
    """
    return _Only(_whole(tokens))


def _whole(tokens: Any) -> Int[np.ndarray, " tokens"]:
    """Returns the tokens, sorted and without duplicates; raises `UserError` for other values."""
    several = list(tokens) if isinstance(tokens, Iterable) else []
    if not several or not all(
        isinstance(token, numbers.Integral) and 0 <= int(token) < 2**31 for token in several
    ):
        raise UserError(f"tokens={tokens!r:.60}: must be one or more non-negative integers")
    return np.array(sorted({int(token) for token in several}), np.int32)


def check_vocabulary(process: Process | None, vocab_size: int) -> None:
    """Raises `UserError` if `bias` or `only` names a token outside the vocabulary."""
    if isinstance(process, _Bias | _Only) and process.tokens[-1] >= vocab_size:
        outside = f"token {process.tokens[-1]} is outside the vocabulary 0..{vocab_size - 1}"
        raise UserError(f"process: {outside}")


def processed(
    process: Process | None,
    tree: Tree,
    nodes: Int[np.ndarray, " width"],
    logits_BxWxV: Float[Array, "batch width vocab"],
    drafted_BxN: NodeTokens,
    committed_BxT: Tokens,
    lengths_B: PerRow,
) -> Float[Array, "batch width vocab"]:
    """Returns the logits at `nodes` (static) after a policy's process; without one, unchanged.

    The logits are those of the token after each of the nodes. `drafted_BxN` are the drafted tokens,
    the root's first; those of `nodes` and above suffice. The first `lengths_B` of `committed_BxT`
    are committed.
    """
    if process is None:
        return logits_BxWxV
    paths, depths = np.pad(tree.paths[nodes], ((0, 0), (0, 1))), tree.depth[nodes]

    def of_sequence(
        logits_WxV: Array, drafted_N: Array, committed_T: Array, length: Array
    ) -> Array:
        place_T = jnp.arange(len(committed_T)) - length

        def of_node(logits: Array, path: Array, depth: Array) -> Array:
            below_T = drafted_N[path[jnp.clip(place_T, 0, len(path) - 1)]]
            tokens_T = jnp.where(place_T < 0, committed_T, jnp.where(place_T < depth, below_T, 0))
            output: Array = process(logits, tokens_T, length + depth)
            has_shape = getattr(output, "shape", None) == logits.shape
            if not has_shape or not jnp.issubdtype(output.dtype, jnp.floating):
                kind = jax.typeof(output) if isinstance(output, jax.Array) else repr(output)
                wanted = f"must return logits float[{len(logits)}]"
                raise UserError(f"process={process!r}: returns {kind}; {wanted}")
            return output

        return jax.vmap(of_node)(logits_WxV, jnp.asarray(paths), jnp.asarray(depths))

    return jax.vmap(of_sequence)(logits_BxWxV, drafted_BxN, committed_BxT, lengths_B)
