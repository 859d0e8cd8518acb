"""Checks of the arguments of `generate`, before anything takes long."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.tree import checked as positive
from spectr_jax.models.frozen import Frozen, check_context
from spectr_jax.utils.errors import UserError


def check_key(key: Any, sequences: int) -> None:
    """Raises `UserError` unless `key` is one typed key, or one per sequence."""
    dtype = getattr(key, "dtype", np.dtype(bool))
    is_typed = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed or key.shape not in ((), (sequences,)):
        given = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        wanted = f"must be a typed key, such as jax.random.key(seed), or {sequences} of them"
        raise UserError(f"key={given}: {wanted}")


def check_method(method: object) -> None:
    """Raises `UserError` unless `method` is a `Method`."""
    if not isinstance(method, Method):
        raise UserError(f"method={method!r}: must be a Method, such as get_method('speculative')")


def whole_numbers(name: str, given: Any) -> Int[np.ndarray, "..."]:
    """Returns `given` as an int32 array.

    Raises:
      UserError: a value is not an integer or is outside int32, or rows differ in length.
    """
    help_ = "give tokens, such as those of `tokenizer.prompts`"
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as error:
        if isinstance(given, Sequence):
            raise UserError(f"{name}: the rows have unequal lengths; pad them") from error
        raise UserError(f"{name}: is a {type(given).__name__}; {help_}") from error
    if array.dtype.kind not in "iuf" or np.any(array != np.floor(array)):
        raise UserError(f"{name}: must be integers, not {array.dtype}; {help_}")
    beyond = array[(array < -(2**31)) | (array >= 2**31)]
    if beyond.size:
        raise UserError(f"{name}: {beyond[0]} is outside int32; {help_}")
    return array.astype(np.int32)


def check_request(
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    prompts: Int[np.ndarray, "..."],
    prompt_lengths: Int[np.ndarray, "..."],
    max_new_tokens: int,
) -> None:
    """Raises `UserError` unless the prompts, models and method fit one another."""
    positive(max_new_tokens=max_new_tokens)
    if prompts.ndim != 2 or prompt_lengths.shape != prompts.shape[:1]:
        shapes = f"prompts {prompts.shape} and prompt_lengths {prompt_lengths.shape}"
        raise UserError(f"{shapes}: must have shapes [B, T] and [B]")
    if not len(prompts) or prompt_lengths.min() < 1 or prompt_lengths.max() > prompts.shape[1]:
        within = f"1..{prompts.shape[1]}; a prompt needs at least BOS"
        raise UserError(f"prompt_lengths={prompt_lengths}: must be within {within}")
    V, longest = target.vocab_size, int(prompt_lengths.max())
    if prompts.min() < 0 or prompts.max() >= V:
        raise UserError(f"prompts: a token is outside 0..{V - 1}; use the target's tokenizer")
    asked = f"prompts of {longest} tokens, max_new_tokens={max_new_tokens}"
    check_context(asked, longest + max_new_tokens, target, "lower one of them")
    children = method.tree.children_table.shape[1]
    rule = method.verifier.rule
    if rule is not None and rule.distinct and children > V:
        hint = f"but there are {V} tokens; give a narrower tree"
        raise UserError(f"method {method.name!r}: a node has {children} children, {hint}")
    if method.needs_draft and draft is None:
        hint = "give one, or use 'lookup'"
        raise UserError(f"method {method.name!r}: needs a draft model; {hint}")
    if method.tree.size:
        method.drafter.check(target, draft)
