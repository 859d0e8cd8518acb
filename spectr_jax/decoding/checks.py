"""What `generate` refuses, before anything takes long."""

import numbers
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from spectr_jax.decoding.methods import Method
from spectr_jax.errors import UserError
from spectr_jax.models.frozen import Frozen


def check_key(key: Any, sequences: int) -> None:
    """Raises `UserError` unless `key` is a typed key, or one for each of the sequences."""
    if not jax.numpy.issubdtype(getattr(key, "dtype", np.dtype(bool)), jax.dtypes.prng_key) or key.shape not in (
        (),
        (sequences,),
    ):
        given = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        raise UserError(f"key is {given}; give jax.random.key(seed), or {sequences} typed keys, one per sequence")


def check_method(method: object) -> None:
    """Raises `UserError` for a name in the place of a method."""
    if not isinstance(method, Method):
        raise UserError(f"method={method!r} is no Method; give one of `get_method`, such as get_method('speculative')")


def checked_prompts(prompts: Any, prompt_lengths: Any) -> tuple[Int[np.ndarray, "..."], Int[np.ndarray, "..."]]:
    """Returns both as int32; raises `UserError` unless they are whole numbers, and rows of one length."""
    arrays = []
    for name, given in (("prompts", prompts), ("prompt_lengths", prompt_lengths)):
        try:
            array = np.asarray(given)
        except ValueError as error:
            raise UserError(f"{name} are rows of several lengths; pad them, as `tokenizer.prompts` does") from error
        if array.dtype.kind not in "iuf" or np.any(array != np.floor(array)):
            raise UserError(f"{name} are {array.dtype} and not whole numbers; give tokens, as `tokenizer.prompts` does")
        arrays.append(array.astype(np.int32))
    return arrays[0], arrays[1]


def check_request(
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    prompts: Int[np.ndarray, "..."],
    prompt_lengths: Int[np.ndarray, "..."],
    max_new_tokens: int,
) -> None:
    """Raises `UserError` for prompts, models or a method that do not go together."""
    if not isinstance(max_new_tokens, numbers.Integral):
        raise UserError(f"max_new_tokens={max_new_tokens!r} is not a whole number; give one of at least 1")
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
        raise UserError(f"a prompt has a token outside 0..{target.vocab_size - 1}; use the target's own tokenizer")
    if method.exit_layer >= target.layers:
        raise UserError(
            f"layers={method.exit_layer} of a target of {target.layers} leave none to verify with; give fewer, at least 1"
            if target.layers > 1
            else "the target has one layer, and no earlier one to draft with; give a draft model and another method"
        )
    if method.drafter is None and method.verifier.rule != "iid" and method.tree.children_table.shape[1] > target.vocab_size:
        raise UserError(
            f"the tree of method {method.name!r} has nodes with {method.tree.children_table.shape[1]} children, and the "
            f"vocabulary {target.vocab_size} distinct tokens; give a narrower tree"
        )
    models = [("target", target)]
    if method.needs_draft:
        if draft is None:
            raise UserError(f"method {method.name!r} drafts, but no draft model was given; give one, or use 'lookup'")
        models.append(("draft", draft))
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
    for name, model in models:
        if model.vocab_size != target.vocab_size:
            raise UserError(
                f"the draft has {model.vocab_size} tokens and the target {target.vocab_size}; use one vocabulary for "
                "both, or spectr_jax.pairs.fitted"
            )
        if prompts.shape[1] + max_new_tokens > model.context:
            raise UserError(
                f"prompts of {prompts.shape[1]} tokens and max_new_tokens={max_new_tokens} exceed the {name}'s context of "
                f"{model.context}; shorten one of them"
            )
