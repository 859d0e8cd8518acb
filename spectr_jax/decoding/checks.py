"""What `generate` refuses, before anything takes long."""

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
    """Raises `UserError` unless `key` is a typed key, or one for each of the sequences."""
    if not jax.numpy.issubdtype(
        getattr(key, "dtype", np.dtype(bool)), jax.dtypes.prng_key
    ) or key.shape not in (
        (),
        (sequences,),
    ):
        given = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        raise UserError(
            f"key is {given}; give jax.random.key(seed), or {sequences} typed keys, one per sequence"
        )


def check_method(method: object) -> None:
    """Raises `UserError` for a name in the place of a method."""
    if not isinstance(method, Method):
        raise UserError(
            f"method={method!r} is no Method; give one of `get_method`, such as get_method('speculative')"
        )


def whole_numbers(name: str, given: Any) -> Int[np.ndarray, "..."]:
    """Returns the numbers as int32; raises `UserError` unless they are whole, within int32, and rows of one length."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as error:
        if not isinstance(given, Sequence):
            raise UserError(
                f"{name} is a {type(given).__name__}; give tokens, as `tokenizer.prompts` does"
            ) from error
        raise UserError(
            f"{name} are rows of several lengths; pad them, as `tokenizer.prompts` does"
        ) from error
    if array.dtype.kind not in "iuf" or np.any(array != np.floor(array)):
        raise UserError(
            f"{name} are {array.dtype} and not whole numbers; give tokens, as `tokenizer.prompts` does"
        )
    if np.any((array < -(2**31)) | (array >= 2**31)):
        beyond = array[(array < -(2**31)) | (array >= 2**31)][0]
        raise UserError(
            f"{name} have {beyond}, which is beyond int32; give tokens, as `tokenizer.prompts` does"
        )
    return array.astype(np.int32)


def check_observe(observe: object) -> None:
    """Raises `UserError` unless `observe` is None or a function that can be static."""
    if observe is not None and not (callable(observe) and isinstance(observe, Hashable)):
        raise UserError(
            f"observe={observe!r}: is not a hashable function; give a function of one Call, or None"
        )


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
    """Raises `UserError` for prompts, models or a method that do not go together."""
    if not isinstance(max_new_tokens, numbers.Integral) or isinstance(max_new_tokens, bool):
        raise UserError(
            f"max_new_tokens={max_new_tokens!r} is not a whole number; give one of at least 1"
        )
    if prompts.ndim != 2 or prompt_lengths.shape != prompts.shape[:1]:
        raise UserError(
            f"prompts {prompts.shape} and prompt_lengths {prompt_lengths.shape} do not match; give [B, T] and [B]"
        )
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} is less than 1; give at least 1")
    if not len(prompts) or prompt_lengths.min() < 1 or prompt_lengths.max() > prompts.shape[1]:
        raise UserError(
            f"prompt lengths {prompt_lengths} are not within 1..{prompts.shape[1]}; each prompt needs at least BOS"
        )
    if prompts.min() < 0 or prompts.max() >= target.vocab_size:
        raise UserError(
            f"a prompt has a token outside 0..{target.vocab_size - 1}; use the target's own tokenizer"
        )
    if method.exit_layer >= target.layers:
        raise UserError(
            f"layers={method.exit_layer} of a target of {target.layers} leave none to verify with; give fewer, at least 1"
            if target.layers > 1
            else "the target has one layer, and no earlier one to draft with; give a draft model and another method"
        )
    if (
        method.drafter is None
        and method.verifier.rule != "iid"
        and method.tree.children_table.shape[1] > target.vocab_size
    ):
        raise UserError(
            f"the tree of method {method.name!r} has nodes with {method.tree.children_table.shape[1]} children, and the "
            f"vocabulary {target.vocab_size} distinct tokens; give a narrower tree"
        )
    if method.needs_draft:
        if draft is None:
            raise UserError(
                f"method {method.name!r} drafts, but no draft model was given; give one, or use 'lookup'"
            )
        if draft.features_seen not in (0, target.features_shown):
            raise UserError(
                f"the draft sees {draft.features_seen} features of its target, and this target shows "
                f"{target.features_shown}; give the target that it was trained for, or another draft"
            )
        if max(draft.feature_layers, default=0) > target.layers:
            raise UserError(
                f"the draft sees layer {max(draft.feature_layers)} of its target, and this target has {target.layers}; give "
                "the target that it was trained for, or another draft"
            )
        if draft.vocab_size != target.vocab_size:
            raise UserError(
                f"the draft has {draft.vocab_size} tokens and the target {target.vocab_size}; use one vocabulary for "
                "both, or spectr_jax.loading.pairs.fitted"
            )
    if (longest := int(prompt_lengths.max())) + max_new_tokens > target.context:
        raise UserError(
            f"prompts of {longest} tokens and max_new_tokens={max_new_tokens} exceed the target's context of "
            f"{target.context}; shorten one of them"
        )
