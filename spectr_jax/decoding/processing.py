"""Functions of logits for `Policy(process=...)`: the distribution of the target is that of the processed logits.

A process is a pure function of (logits [V], tokens [T], length), written in JAX for one place of one sequence. Every node of
a draft tree is given its own path: of `tokens`, the first `length` are those before the place, the prompt included; the
others are 0. It returns logits [V]; -inf excludes a token. T is the room of a decoding and may differ from call to call.

Those below are equal, and share a program, if their arguments are. A function of your own is compiled once for each object.
"""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from spectr_jax.decoding.policy import Policy
from spectr_jax.decoding.tree import Tree
from spectr_jax.transport.types import IntScalar
from spectr_jax.utils.errors import UserError

_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class _RepetitionPenalty:
    penalty: float

    def __call__(
        self, logits: Float[Array, " vocab"], tokens: Int[Array, " time"], length: IntScalar
    ) -> Array:
        places = jnp.where(jnp.arange(len(tokens)) < length, tokens, len(logits))
        occurs = jnp.zeros(len(logits), bool).at[places].set(True, mode="drop")
        return jnp.where(
            occurs, jnp.where(logits > 0, logits / self.penalty, logits * self.penalty), logits
        )


@dataclasses.dataclass(frozen=True)
class _Bias:
    tokens: tuple[int, ...]
    values: tuple[float, ...]

    def __call__(
        self, logits: Float[Array, " vocab"], tokens: Int[Array, " time"], length: IntScalar
    ) -> Array:
        del tokens, length
        _check_vocabulary(self.tokens, len(logits))
        return logits.at[jnp.array(self.tokens)].add(jnp.array(self.values, logits.dtype))


@dataclasses.dataclass(frozen=True)
class _Only:
    tokens: tuple[int, ...]

    def __call__(
        self, logits: Float[Array, " vocab"], tokens: Int[Array, " time"], length: IntScalar
    ) -> Array:
        del tokens, length
        _check_vocabulary(self.tokens, len(logits))
        allowed = np.isin(np.arange(len(logits)), self.tokens)
        return jnp.where(allowed, logits, -jnp.inf)


def repetition_penalty(penalty: float) -> Any:
    """Returns a process that makes repetitions less likely, or more with a penalty below 1 (Keskar et al., 2019, arXiv
    1909.05858).

    Of tokens that occur in the sequence, prompt included, positive logits are divided by `penalty`, others multiplied by it.

    Raises:
      UserError: the penalty is not a positive number in float32.
    """
    if (
        not isinstance(penalty, numbers.Real)
        or not float(np.finfo(np.float32).tiny) <= penalty <= _LARGEST
    ):
        raise UserError(
            f"penalty={penalty!r}: must be a positive number; above 1 makes repetitions less likely"
        )
    return _RepetitionPenalty(float(penalty))


def bias(values: Mapping[int, float]) -> Any:
    """Returns a process that adds a value to the logit of each of some tokens; -inf bans a token.

    Raises:
      UserError: `values` is empty, or not {token: number}.
    """
    if not isinstance(values, Mapping) or not values:
        raise UserError(
            f"values={values!r:.60}: must map tokens to numbers, such as {{7: -float('inf')}}"
        )
    for value in values.values():
        if not isinstance(value, numbers.Real) or not (
            value == -math.inf or abs(value) <= _LARGEST
        ):
            raise UserError(
                f"values: {value!r} is not a finite number in float32; give one, or -inf to ban a token"
            )
    tokens = _whole(values)
    return _Bias(tokens, tuple(float(values[token]) for token in tokens))


def only(tokens: Iterable[int]) -> Any:
    """Returns a process that allows these tokens alone.

    Raises:
      UserError: there are none, or one is not a whole number.
    """
    return _Only(_whole(tokens))


def _whole(tokens: Any) -> tuple[int, ...]:
    """Returns sorted tokens."""
    several = list(tokens) if isinstance(tokens, Iterable) else []
    if not several or not all(
        isinstance(token, numbers.Integral) and 0 <= int(token) < 2**31 for token in several
    ):
        raise UserError(f"tokens={tokens!r:.60}: must be whole numbers from 0 on, at least one")
    return tuple(sorted({int(token) for token in several}))


def _check_vocabulary(tokens: tuple[int, ...], vocab_size: int) -> None:
    if tokens[-1] >= vocab_size:
        raise UserError(
            f"process: token {tokens[-1]} is outside the vocabulary 0..{vocab_size - 1}; leave it out"
        )


def at_nodes(
    policy: Policy,
    tree: Tree,
    nodes: Int[np.ndarray, " width"],
    logits_BxWxV: Float[Array, "batch width vocab"],
    drafted_BxN: Int[Array, "batch nodes"],
    committed_BxT: Int[Array, "batch time"],
    lengths_B: Int[Array, " batch"],
) -> Float[Array, "batch width vocab"]:
    """Returns the logits at nodes of a tree after the policy's process, which is given the path to each.

    Args:
      policy: without a process, the logits are returned as they are.
      tree: static.
      nodes: static, those of the logits.
      logits_BxWxV: of the token after each node.
      drafted_BxN: tokens by node, the root's first; those of the nodes above `nodes` and their own suffice.
      committed_BxT: tokens, of `lengths_B` each.
      lengths_B: int32.
    """
    process = policy.process
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
            made: Array = process(logits, tokens_T, length + depth)
            if getattr(made, "shape", None) != logits.shape or not jnp.issubdtype(
                made.dtype, jnp.floating
            ):
                kind = jax.typeof(made) if isinstance(made, jax.Array) else repr(made)
                raise UserError(
                    f"process={process!r}: returns {kind}, which must be logits float[{len(logits)}]"
                )
            return made

        return jax.vmap(of_node)(logits_WxV, jnp.asarray(paths), jnp.asarray(depths))

    return jax.vmap(of_sequence)(logits_BxWxV, drafted_BxN, committed_BxT, lengths_B)
