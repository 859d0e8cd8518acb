"""Loads a target with drafts that share its vocabulary, except for added or padded tokens."""

from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from spectr_jax.data.tokenizer import UNKNOWN, VocabularyOf
from spectr_jax.loading.by_name import Trained, load
from spectr_jax.models import parallel
from spectr_jax.models.base import features_seen, features_shown
from spectr_jax.models.vocabulary import SharedTokens
from spectr_jax.utils.errors import UserError

REMEDY = "give the target that it was trained for, or another draft"
SHARED = 0.95
"""Least share of the smaller vocabulary that a pair has in common. Unrelated ones share ~0."""
SHOWN = 3
"""Number of different tokens that an error shows."""


def load_pair(
    target: str, drafts: Sequence[str], dtype: str | None = None, mesh: Mesh | None = None
) -> tuple[Trained, list[Trained]]:
    """Returns a target and its drafts, each draft `fitted` to the target.

    `dtype` and `mesh` are those of `load`. A draft is read whole on one device first.

    Raises:
      UserError: as `load` and `fitted`.
    """
    if isinstance(drafts, str):
        raise UserError(f"drafts={drafts!r}: must be a tuple of names; give ({drafts!r},)")
    loaded_target = load_alone(target, dtype, mesh)
    return loaded_target, [fitted(load(draft, dtype), loaded_target, mesh) for draft in drafts]


def load_alone(spec: str, dtype: str | None = None, mesh: Mesh | None = None) -> Trained:
    """Returns a model that runs by itself, such as a target.

    Raises:
      UserError: as `load_callable`, or the model is a draft without a tokenizer.
    """
    trained = load_callable(spec, dtype, mesh)
    if isinstance(trained.tokenizer, VocabularyOf):
        raise UserError(f"{spec!r} drafts for its target only; give a model with a tokenizer")
    return trained


def load_callable(spec: str, dtype: str | None = None, mesh: Mesh | None = None) -> Trained:
    """Returns a model that can be called on tokens alone. It may lack a tokenizer.

    Raises:
      UserError: as `load`, or the model is a draft that sees a target's features.
    """
    trained = load(spec, dtype, mesh)
    if features_seen(trained.model):
        raise UserError(
            f"{spec!r} sees the features of a target, and can only draft for it; give a model that "
            "runs alone"
        )
    return trained


def completed(draft: Trained, target: Trained) -> Trained:
    """Returns `draft` with the parts that it takes from `target` (`Eagle3.completed`).

    Raises:
      UserError: the draft sees features that the target does not show, or the target lacks a part.
    """
    seen, shown = features_seen(draft.model), features_shown(target.model)
    if seen not in (0, shown):
        raise UserError(
            f"draft {draft.name!r} reads hidden states of width {seen}, and those of target "
            f"{target.name!r} have width {shown}; {REMEDY}"
        )
    complete = getattr(draft.model, "completed", None)
    return draft if complete is None else draft._replace(model=complete(target.model))


def fitted(draft: Trained, target: Trained, mesh: Mesh | None = None) -> Trained:
    """Returns `draft` adapted to draft for `target`, and `completed`.

    On a mesh it is placed by `parallel.draft_on_mesh`.

    With equal vocabularies it is returned unchanged. If they differ by added or padded tokens only,
    as in a family of models, it drafts the tokens that both have (token-level intersection: Timor
    et al., 2025, arXiv 2502.05202).

    Raises:
      UserError: the vocabularies share less than 95 % of their tokens, or the draft sees features
        that the target does not show.
    """
    draft = completed(draft, target)
    sizes = draft.model.vocab_size, target.model.vocab_size
    if draft.tokenizer.vocabulary in (UNKNOWN, target.tokenizer.vocabulary):
        if sizes[0] == sizes[1]:
            return _placed(draft, mesh)
        shared = np.arange(sizes[1]) < min(sizes)
    else:
        shared = np.zeros(sizes[1], bool)
        same = _same_tokens(draft, target)[: min(sizes)]
        shared[: len(same)] = same
    if features_seen(draft.model):
        raise UserError(
            f"draft {draft.name!r} sees the features of another target than {target.name!r}: they "
            f"have {sizes[0]} and {sizes[1]} tokens; {REMEDY}"
        )
    return draft._replace(model=SharedTokens(_placed(draft, mesh).model, shared))


def _placed(draft: Trained, mesh: Mesh | None) -> Trained:
    if mesh is None:
        return draft
    return draft._replace(model=parallel.draft_on_mesh(mesh, draft.model).merge())


def _same_tokens(draft: Trained, target: Trained) -> np.ndarray:
    """Returns, for each id in both vocabularies, whether it is the same token."""
    pair = f"draft {draft.name!r} and target {target.name!r} have different vocabularies"
    remedy = "give models that share one, such as two of a family or of one data.tokenizer"
    for model in (draft, target):
        if not model.tokenizer.tokens:
            raise UserError(f"{pair}: the tokenizer of {model.name!r} lists no tokens; {remedy}")
    first, second = draft.tokenizer.tokens, target.tokenizer.tokens
    same = np.array([a == b for a, b in zip(first, second, strict=False)])
    if same.sum() < SHARED * len(same):
        differ = np.flatnonzero(~same)
        shown = ", ".join(f"{id} ({first[id]!r:.24}, {second[id]!r:.24})" for id in differ[:SHOWN])
        both = len(set(first) & set(second))
        raise UserError(
            f"{pair} of {len(first)} and {len(second)} tokens: {len(differ)} of {len(same)} common "
            f"ids differ, such as {shown}; {both} tokens are in both at any ids; {remedy}"
        )
    return same
