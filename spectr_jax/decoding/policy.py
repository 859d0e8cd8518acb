"""Sampling policies: temperature, top-k, top-p, min-p, and the tokens that end a sequence."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError

Number: TypeAlias = float | Shaped[Array, "*rows"] | Shaped[np.ndarray, "*rows"]

Logits: TypeAlias = Float[Array, "*batch vocab"]
Rows: TypeAlias = Float[Array, "*rows"]
Limits: TypeAlias = dict[str, Array] | None

Process: TypeAlias = Callable[[Array, Array, Array], Array]
"""A function of logits [V], tokens [T] and their number, as in `decoding.processing`."""

LOWEST = -(2**31) + 0x7FFFFF
"""The integer for -inf under the map from float32 to int32 that preserves order."""

STEPS = 31
"""The number of bisection steps between `LOWEST` and 0, the integer of the largest logit."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Policy:
    """A sampling policy, applied to draft and target alike unless the draft has its own.

    Each number is a scalar, or [B] with one value per sequence. Numbers are traced, so new values
    compile nothing. Policies with and without limits (`top_k`, `top_p`, `min_p`) are two programs;
    a policy without limits does no work for them.

    Attributes:
      temperature: 0 is greedy: all mass on the most probable token.
      top_k: keeps the k most probable tokens, and ties of the last; 0 keeps all.
      top_p: then keeps the smallest set of top tokens with this mass, and ties; 1 keeps all.
      eos: the token that ends a sequence, or several; -1 for none. The same for all sequences.
      min_p: keeps tokens with at least this fraction of the largest probability; 0 keeps all.
      process: a function of logits [V], tokens [T] and their number, applied first
        (`decoding.processing`). A pytree with `__call__` is traced; any other function is static.
    """

    temperature: Number = 1.0
    top_k: int | Number = 0
    top_p: Number = 1.0
    eos: int | tuple[int, ...] | Int[Array, "*several"] = -1
    min_p: Number = 0.0
    process: Process | None = None

    def __post_init__(self) -> None:
        if callable(self.process) and jax.tree_util.all_leaves([self.process]):
            object.__setattr__(self, "process", Static(self.process))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Static:
    """A function without arrays, as a pytree that passes through `jax.jit`."""

    function: Process = dataclasses.field(metadata={"static": True})

    def __call__(self, logits: Array, tokens: Array, length: Array) -> Array:
        return self.function(logits, tokens, length)

    def __repr__(self) -> str:
        return repr(self.function)


class Shaping(NamedTuple):
    """What turns processed logits into probabilities, for each sequence."""

    temperature: Rows
    limits: Limits  # None if all tokens are kept: the program then has no code for limits.


class PolicyRows(NamedTuple):
    """A policy with one value per sequence."""

    shaping: Shaping
    eos: Int[Array, "*batch several"]
    process: Process | None  # The same for all sequences.

    def of(self, rows: Int[Array, " rows"] | Int[np.ndarray, " rows"]) -> "PolicyRows":
        """Returns the policies of some of the sequences."""
        shaping, eos = jax.tree.map(lambda values: values[rows], (self.shaping, self.eos))
        return self._replace(shaping=shaping, eos=eos)


LIMITS = {"top_k": np.int32(0), "top_p": np.float32(1), "min_p": np.float32(0)}
"""The limits of a policy, with the values that keep all tokens."""

_TINY = float(np.finfo(np.float32).tiny)
_RANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "temperature": (
        lambda x: (x == 0) | ((x >= _TINY) & (x < np.inf)),
        f"must be 0 (greedy) or a finite number of at least {_TINY:.1e}",
    ),
    "top_k": (
        lambda x: (x == np.floor(x)) & (x >= 0) & (x < 2**31),
        "must be a non-negative integer (0 disables top-k)",
    ),
    "top_p": (lambda x: (x >= _TINY) & (x <= 1), "must be in (0, 1] in float32 (1 disables top-p)"),
    "min_p": (
        lambda x: (x == 0) | ((x >= _TINY) & (x <= 1)),
        "must be in [0, 1] in float32 (0 disables min-p)",
    ),
}
"""The valid values of each number of a policy, and the error for others."""


def has_rows(policy: Policy | None) -> bool:
    """Returns whether a policy has a number with one value per sequence."""
    return policy is not None and any(np.ndim(getattr(policy, name)) for name in _RANGES)


def check_policy(policy: Policy, sequences: int | None = None, owner: str = "") -> None:
    """Raises `UserError` for a value that is out of range in the precision of the device.

    Arrays must have one value for each of `sequences`, if that is known. `owner` is a prefix for
    the names in the message, such as "draft_".
    """
    if not isinstance(policy, Policy):
        wanted = "must be a Policy, such as Policy(temperature=0.7)"
        raise UserError(f"{owner}policy={policy!r}: {wanted}")
    if policy.process is not None and not _is_process(policy.process):
        wanted = "must be a hashable function of (logits, tokens, length)"
        raise UserError(f"{owner}process={policy.process!r}: {wanted}")
    for name, (in_range, message) in _RANGES.items():
        given = getattr(policy, name)
        values = _numbers(given)
        with np.errstate(over="ignore", under="ignore"):
            narrow = values if name == "top_k" else values.astype(np.float32)
        if not np.all(in_range(values) & in_range(narrow)):
            raise UserError(f"{owner}{name}={given}: {message}")
        if values.ndim > 1 or (values.ndim and sequences is not None and len(values) != sequences):
            shape = f"has shape {list(values.shape)} for {sequences} sequences"
            raise UserError(f"{owner}{name}: {shape}; give one number, or one per sequence")
    eos = _numbers(policy.eos)
    is_tokens = eos.dtype.kind in "iu" and eos.ndim < 2 and eos.size
    if not is_tokens or np.any((eos < -1) | (eos >= 2**31)):
        wanted = "must be a token, such as tokenizer.eos, several tokens, or -1 for none"
        raise UserError(f"{owner}eos={policy.eos!r}: {wanted}")


def _is_process(process: Any) -> bool:
    """Returns whether `process` is a function of three arguments, as far as Python knows.

    A function without arrays must be hashable; a pytree need not be.
    """
    is_static = isinstance(process, Static)
    function = process.function if is_static else process
    try:
        inspect.signature(function).bind("logits", "tokens", "length")
    except TypeError:
        return False
    except ValueError:  # Some functions written in C have no signature.
        pass
    return not is_static or isinstance(function, Hashable)


def _numbers(given: Any) -> Shaped[np.ndarray, "..."]:
    """Returns `given` as an array of integers or float64 numbers; NaN if it is neither."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError):
        return np.array(np.nan)
    if array.dtype.kind in "iu":
        return array
    is_floating = jnp.issubdtype(array.dtype, np.floating)
    return array.astype(np.float64) if is_floating else np.array(np.nan)


def for_rows(policy: Policy, sequences: int) -> PolicyRows:
    """Returns the policy with one value per sequence."""

    def rows(value: Any, ndim: int = 1) -> Any:
        if value.ndim == ndim:
            return value
        return _numpy(value).broadcast_to(value, (sequences, *value.shape))

    eos = _array(policy.eos, np.int32)
    return PolicyRows(
        shaping=jax.tree.map(rows, shaping_of(policy)),
        eos=rows(eos if eos.ndim else eos.reshape(1), ndim=2),
        process=policy.process,
    )


def shaping_of(policy: Policy) -> Shaping:
    """Returns the temperature and the limits of a policy as arrays.

    Limits that are known to keep all tokens are None.
    """
    limits = {name: getattr(policy, name) for name in LIMITS}
    traced = _numpy(list(limits.values())) is jnp
    limited = traced or any(np.any(np.asarray(limits[name]) != LIMITS[name]) for name in LIMITS)
    arrays = {name: _array(limits[name], LIMITS[name].dtype) for name in LIMITS}
    temperature = _array(policy.temperature, np.float32)
    return Shaping(temperature=temperature, limits=arrays if limited else None)


def _numpy(value: Any) -> Any:
    """Returns NumPy, or `jax.numpy` if `value` is traced: concrete arguments compile nothing."""
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
    return jnp if traced else np


def _array(value: Any, dtype: Any) -> Any:
    """Returns a copy of `value` as an array of NumPy, or of JAX if it is traced."""
    return _numpy(value).array(value, dtype)


def ends(tokens: Int[Array, "*shape"], eos: Int[Array, "*batch several"]) -> Bool[Array, "*shape"]:
    """Returns which tokens end a sequence; -1 (the target had no distribution) always does."""
    return jnp.any(tokens[..., None] == eos[..., None, :], axis=-1) | (tokens < 0)


def probabilities(logits: Logits, policy: Policy) -> Logits:
    """Returns the float32 distribution of `logits` [..., V] under `policy`, without its process.

    If the policy has one value per sequence, the first dimension of the logits is the sequences.
    """
    return shaped(logits, shaping_of(policy))


@jax.jit
def shaped(logits: Logits, shaping: Shaping) -> Logits:
    """Returns the float32 distribution of processed `logits` [..., V].

    If `shaping` has one value per sequence, the first dimension of the logits is the sequences.
    """

    def by_row(rows: Array) -> Array:
        return rows.reshape(*rows.shape, *[1] * (logits.ndim - rows.ndim))

    temperature, limits = jax.tree.map(by_row, shaping)
    softened = functools.partial(_softened, logits, temperature, limits)
    greedy = functools.partial(_greedy, logits)

    def both() -> Array:
        return jnp.where(temperature > 0, softened(), greedy())

    if not backend.on_cpu():  # On an accelerator, a conditional would make the host wait.
        return both()

    def some() -> Any:
        return jax.lax.cond(jnp.any(temperature > 0), both, greedy)

    otherwise = greedy if temperature.size == 1 else some
    return jax.lax.cond(jnp.all(temperature > 0), softened, otherwise)


def _softened(logits: Logits, temperature: Rows, limits: Limits) -> Logits:
    # Subtract the largest first: dividing by a tiny temperature amplifies rounding errors.
    largest = jnp.max(logits, axis=-1, keepdims=True).astype(jnp.float32)
    # XLA for CPUs may fold the exponential of a constant NaN into an arbitrary number.
    possible = jnp.isfinite(largest) if backend.on_cpu() else True
    relative = jnp.where(possible, logits.astype(jnp.float32) - largest, 0)
    weights = jnp.exp(relative / jnp.where(temperature > 0, temperature, 1.0))  # The largest is 1.
    if limits is not None:
        weights = _limited(relative, weights, **limits)
    return weights / jnp.where(possible, jnp.sum(weights, axis=-1, keepdims=True), jnp.nan)


def _limited(
    relative: Logits, weights: Logits, top_k: Int[Array, "*rows"], top_p: Rows, min_p: Rows
) -> Logits:
    """Returns the weights, with 0 for tokens that a limit excludes.

    Bisection over the integers that order float32 numbers finds the smallest kept logit without a
    sort.
    """
    bits = jax.lax.bitcast_convert_type(relative, jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def least(wanted: Bool[Array, "*rows"], amounts: Array, bound: Array) -> Int[Array, "*batch 1"]:
        none = jnp.full((*order.shape[:-1], 1), LOWEST, jnp.int32)

        def some() -> Array:
            return jnp.where(wanted, _least(order, amounts, bound), none)

        if not backend.on_cpu():
            return some()
        return jax.lax.cond(jnp.any(wanted), some, lambda: none)

    weights = jnp.where(order >= least(top_k > 0, jnp.ones_like(order), top_k), weights, 0)
    mass = top_p * jnp.sum(weights, axis=-1, keepdims=True)
    weights = jnp.where(order >= least(top_p < 1, weights, mass), weights, 0)
    return jnp.where(weights >= min_p, weights, 0)


def _least(
    order: Int[Array, "*batch vocab"],
    amounts: Shaped[Array, "*batch vocab"],
    bound: Shaped[Array, "*rows 1"],
) -> Int[Array, "*batch 1"]:
    """Returns the smallest integer in `LOWEST`..0 above which `amounts` sum to below `bound`."""

    def halve(_: Any, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + ((high - low) >> 1)
        above = jnp.where(order > middle, amounts, 0)
        enough = jnp.sum(above, axis=-1, keepdims=True, dtype=amounts.dtype) < bound
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    shape = (*order.shape[:-1], 1)
    start = jnp.full(shape, LOWEST, jnp.int32), jnp.zeros(shape, jnp.int32)
    return jax.lax.fori_loop(0, STEPS, halve, start)[1]


def _greedy(logits: Logits) -> Logits:
    """Returns all mass on the first largest logit; NaN if a logit is NaN or all are -inf."""
    tokens = jnp.arange(logits.shape[-1])
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # On a CPU, argmax takes thirty times as long as a minimum.
    best = jnp.min(jnp.where(logits == largest, tokens, len(tokens)), axis=-1, keepdims=True)
    undefined = jnp.isnan(largest) | (largest == -jnp.inf)
    return jnp.where(undefined, jnp.nan, tokens == best).astype(jnp.float32)
