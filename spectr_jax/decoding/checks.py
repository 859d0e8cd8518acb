"""Checks of the arguments of `generate`, before anything takes long."""

import numbers
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from spectr_jax.decoding.methods import Method
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils.errors import UserError


def check_key(key: Any, sequences: int) -> None:
    """Raises `UserError` unless `key` is one typed key, or one per sequence."""
    dtype = getattr(key, "dtype", np.dtype(bool))
    is_typed = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed or key.shape not in ((), (sequences,)):
        given = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        raise UserError(
            f"key={given}: must be a typed key, such as jax.random.key(seed), or one for each of "
            f"{sequences} sequences"
        )


def check_method(method: object) -> None:
    """Raises `UserError` unless `method` is a `Method`."""
    if not isinstance(method, Method):
        raise UserError(f"method={method!r}: must be a Method, such as get_method('speculative')")


def whole_numbers(name: str, given: Any) -> Int[np.ndarray, "..."]:
    """Returns `given` as an int32 array.

    Raises:
      UserError: not integers, outside int32, or rows of unequal lengths.
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


def check_observe(observe: object) -> None:
    """Raises `UserError` unless `observe` is None or a hashable function."""
    if observe is not None and not (callable(observe) and isinstance(observe, Hashable)):
        raise UserError(f"observe={observe!r}: must be a hashable function of one Call, or None")


def check_flag(name: str, given: object) -> None:
    """Raises `UserError` unless the argument is True or False."""
    if not isinstance(given, bool):
        raise UserError(f"{name}={given!r}: must be True or False")


def check_request(
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    prompts: Int[np.ndarray, "..."],
    prompt_lengths: Int[np.ndarray, "..."],
    max_new_tokens: int,
) -> None:
    """Raises `UserError` unless the prompts, models and method fit one another."""
    if (
        not isinstance(max_new_tokens, numbers.Integral)
        or isinstance(max_new_tokens, bool)
        or max_new_tokens < 1
    ):
        raise UserError(f"max_new_tokens={max_new_tokens!r}: must be a positive integer")
    if prompts.ndim != 2 or prompt_lengths.shape != prompts.shape[:1]:
        shapes = f"prompts {prompts.shape} and prompt_lengths {prompt_lengths.shape}"
        raise UserError(f"{shapes}: must have shapes [B, T] and [B]")
    if not len(prompts) or prompt_lengths.min() < 1 or prompt_lengths.max() > prompts.shape[1]:
        raise UserError(
            f"prompt_lengths={prompt_lengths}: must be within 1..{prompts.shape[1]}; "
            "a prompt is at least BOS"
        )
    if prompts.min() < 0 or prompts.max() >= target.vocab_size:
        raise UserError(
            f"prompts: a token is outside 0..{target.vocab_size - 1}; use the target's tokenizer"
        )
    longest = int(prompt_lengths.max())
    if longest + max_new_tokens > target.context:
        raise UserError(
            f"prompts of {longest} tokens and max_new_tokens={max_new_tokens} exceed the target's "
            f"context of {target.context}; shorten one of them"
        )
    if method.exit_layer >= target.layers:
        raise UserError(
            f"layers={method.exit_layer}: must be less than the target's layers={target.layers}; "
            "give fewer, or another method and a draft model"
        )
    children = method.tree.children_table.shape[1]
    distinct = method.drafter is None and method.verifier.rule != "iid"
    if distinct and children > target.vocab_size:
        raise UserError(
            f"method {method.name!r}: a node has {children} children, more than the vocabulary of "
            f"{target.vocab_size} has tokens; give a narrower tree"
        )
    if method.needs_draft:
        _check_draft(method, target, draft)


def _check_draft(method: Method, target: Frozen, draft: Frozen | None) -> None:
    """Raises `UserError` unless the draft model fits its target."""
    if draft is None:
        raise UserError(
            f"method {method.name!r}: needs a draft model; give one, or use method 'lookup'"
        )
    if draft.features_seen not in (0, target.features_shown):
        raise UserError(
            f"draft: sees {draft.features_seen} features, but this target has "
            f"{target.features_shown}; give the target that the draft was trained for"
        )
    deepest = max(draft.feature_layers, default=0)
    if deepest > target.layers:
        raise UserError(
            f"draft: sees layer {deepest}, but this target has {target.layers} layers; give the "
            "target that the draft was trained for"
        )
    if draft.vocab_size != target.vocab_size:
        raise UserError(
            f"draft: has {draft.vocab_size} tokens, but the target has {target.vocab_size}; use a "
            "common vocabulary, or spectr_jax.loading.pairs.fitted"
        )
