"""A target and its drafts, which share a vocabulary, or all of it but for added tokens."""

import numpy as np

from spectr_jax.data.tokenizer import VocabularyOf
from spectr_jax.loading.by_name import Trained, load
from spectr_jax.models.base import features_seen, features_shown
from spectr_jax.models.vocabulary import SharedTokens
from spectr_jax.utils.errors import UserError

SHARED = 0.95
"""Of the smaller vocabulary; two that were made apart share next to nothing at the same ids."""


def load_pair(
    target: str, drafts: tuple[str, ...], dtype: str | None
) -> tuple[Trained, list[Trained]]:
    """Loads a target and its drafts, each draft `fitted` to the target.

    Raises:
      UserError: as `load` and `fitted`.
    """
    loaded_target = load_alone(target, dtype)
    return loaded_target, [fitted(load(draft, dtype), loaded_target) for draft in drafts]


def load_alone(spec: str, dtype: str | None = None) -> Trained:
    """Loads a model that runs by itself, such as a target.

    Raises:
      UserError: as `load_callable`; or it is a draft that knows its tokens by number only.
    """
    trained = load_callable(spec, dtype)
    if isinstance(trained.tokenizer, VocabularyOf):
        raise UserError(
            f"{spec!r} is a draft without a tokenizer, and drafts for its target only; give one "
            "that runs alone"
        )
    return trained


def load_callable(spec: str, dtype: str | None = None) -> Trained:
    """Loads a model that can be called by itself, on tokens alone; it may know them by number only.

    Raises:
      UserError: as `load`; or it is a draft that sees the features of a target.
    """
    trained = load(spec, dtype)
    if features_seen(trained.model):
        raise UserError(
            f"{spec!r} sees the features of a target, and can only draft for it; give a model that "
            "runs alone"
        )
    return trained


def fitted(draft: Trained, target: Trained) -> Trained:
    """Returns `draft` adapted so that it can draft for `target`.

    It is returned as it is if the two have one vocabulary. If they differ by added or padded tokens
    only, such as the members of a family, it drafts the tokens that both have (token-level
    intersection: Timor et al., 2025, arXiv 2502.05202).

    Raises:
      UserError: they share less than 95 % of their tokens, or the draft sees features that the
        target does not show.
    """
    if features_seen(draft.model) not in (0, features_shown(target.model)):
        raise UserError(
            f"draft {draft.name!r} sees {features_seen(draft.model)} features of its target, and "
            f"{target.name!r} shows "
            f"{features_shown(target.model)}; give the target that it was trained for, or another "
            "draft"
        )
    sizes = draft.model.vocab_size, target.model.vocab_size
    if draft.tokenizer.vocabulary == target.tokenizer.vocabulary:
        if sizes[0] == sizes[1]:
            return draft
        shared = np.arange(sizes[1]) < min(sizes)
    else:
        shared = np.zeros(sizes[1], bool)
        same = _same_tokens(draft, target)[: min(sizes)]
        shared[: len(same)] = same
    if features_seen(draft.model):
        raise UserError(
            f"draft {draft.name!r} sees the features of the target that it was trained for, and "
            f"{target.name!r} is another; "
            "give that target, or another draft"
        )
    return draft._replace(model=SharedTokens(draft.model, shared))


def _same_tokens(draft: Trained, target: Trained) -> np.ndarray:
    """Of each id that both vocabularies have, whether it is the same token in both."""
    pair = f"draft {draft.name!r} and target {target.name!r} have different vocabularies"
    remedy = "give models that share one, such as two of a family, or two that were trained with one data.tokenizer"
    first, second = draft.tokenizer.tokens, target.tokenizer.tokens
    if first is None or second is None:
        raise UserError(f"{pair}; {remedy}")
    same = np.array([a == b for a, b in zip(first, second, strict=False)])
    smaller = min(len(first), len(second))
    if same.sum() < SHARED * smaller:
        both = len(set(first) & set(second))
        raise UserError(
            f"{pair}: of {smaller} tokens {same.sum()} are the same at the same ids ({both} at any "
            f"ids); {remedy}"
        )
    return same
