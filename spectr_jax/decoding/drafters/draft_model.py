"""A draft model: it fills the tree level by level (SpecTr, section 7)."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float

from spectr_jax.decoding.drafters import levels
from spectr_jax.decoding.drafters.base import RECALLED, Drafter, Drafts, Sequences, Setup, Verified
from spectr_jax.decoding.drafters.feature_model import FeatureModel
from spectr_jax.decoding.running import run_on_prompts
from spectr_jax.decoding.tree import Keys
from spectr_jax.models.base import features_seen
from spectr_jax.models.cache import Cache, keep
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils.errors import UserError


@dataclasses.dataclass(frozen=True)
class DraftModel(Drafter):
    """Draws from a draft model; its state is the model's KV cache."""

    needs_model: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def check(self, target: Frozen, draft: Frozen | None) -> None:
        """Raises `UserError` unless the draft model fits its target."""
        assert draft is not None
        hint = "give the target that the draft was trained for"
        seen, shown, V = draft.features_seen, target.features_shown, target.vocab_size
        if seen not in (0, shown):
            raise UserError(f"draft: sees {seen} features, but this target has {shown}; {hint}")
        deepest = max(draft.feature_layers, default=0)
        if deepest > target.layers:
            layers = f"sees layer {deepest}, but this target has {target.layers}"
            raise UserError(f"draft: {layers}; {hint}")
        if draft.vocab_size != V:
            hint = "use a common vocabulary, or spectr_jax.loading.pairs.fitted"
            raise UserError(f"draft: has {draft.vocab_size} tokens, but the target has {V}; {hint}")

    def for_model(self, draft: Any) -> Drafter:
        """Returns `FeatureModel()` for a draft that sees the target's features."""
        return FeatureModel() if features_seen(draft) else self

    def init(
        self,
        setup: Setup,
        prompts: Sequences,
        capacity: int,
        features_BxTxF: Float[Array, "batch time features"] | None,
    ) -> Cache:
        """See `Drafter.init`."""
        cache, _ = run_on_prompts(setup.draft, *prompts, capacity)
        return dataclasses.replace(cache, lengths=levels.committed_length(prompts.lengths))

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: Cache, target_cache: Cache
    ) -> Drafts:
        """See `Drafter.draft`. Consumes `keys_B`."""
        drawn = levels.draw(setup, keys_B, setup.draft, sequences, state, RECALLED)
        return Drafts(tokens=drawn.tokens, p=drawn.p, state=drawn.cache, target_cache=target_cache)

    def commit(self, setup: Setup, state: Cache, verified: Verified) -> Cache:
        """Keeps the accepted path, except its last node, in the cache.

        The last node may be a leaf, on which the draft has not run, so the next call recalls it.
        """
        tree, path_BxD = setup.tree, verified.path
        roots_B = verified.before - 1 - state.lengths
        height = path_BxD.shape[1]
        # The first recalled row is already in place.
        index_D = jnp.arange(1, height + RECALLED)
        below_root = index_D[None, :] - roots_B[:, None] - 1
        nodes = jnp.take_along_axis(path_BxD, jnp.clip(below_root, 0, height - 1), axis=1)
        of_nodes = RECALLED + jnp.asarray(tree.inner_rank)[nodes] - 1
        pending = jnp.where(below_root < 0, index_D[None, :], of_nodes)
        lengths_B = levels.committed_length(verified.after.lengths)
        return keep(state, pending, lengths_B, in_place=1)
