"""A draft model that sees the target's features (its last hidden states).

Such a draft (`models.base.SeesFeatures`) reads each token with the features of the token before it.
After each call of the target, the draft runs on all tokens that the call added, with the target's
features. Deeper in the tree, where the target has not run yet, it uses its own features. Some
drafts also see outputs of lower layers: then the target's features have width F = (1 + layers) * E,
and the draft's own have width E.

Sources: EAGLE (Li et al., 2024, arXiv 2401.15077); EAGLE-3 (Li et al., 2025, arXiv 2503.01840).

Shape suffixes: B sequences, T tokens of a sequence, R recalled tokens, F features.
"""

import dataclasses
import functools
from typing import ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spectr_jax.decoding.drafters import levels
from spectr_jax.decoding.drafters.base import Drafter, Drafts, Features, Sequences, Setup, Verified
from spectr_jax.decoding.running import run_on_prompts
from spectr_jax.decoding.tree import Keys
from spectr_jax.models.base import Model, feature_layers
from spectr_jax.models.cache import Cache
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils.errors import UserError

Recalled: TypeAlias = Float[Array, "batch recalled features"]


class _State(NamedTuple):
    cache: Cache  # The draft's.
    features: Recalled  # The target's, for the last R tokens: those of the token before each.


@dataclasses.dataclass(frozen=True)
class FeatureModel(Drafter):
    """Draws from a draft model that sees the target's features."""

    needs_model: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def check(self, target: Frozen, draft: Frozen | None) -> None:
        assert draft is not None
        seen, shown = draft.features_seen, target.features_shown
        hint = "give the target that the draft was trained for"
        if seen != shown or not seen:
            problem = f"sees {seen} features, but this target has {shown}"
            raise UserError(f"draft: {problem}; {hint}")
        deepest = max(draft.feature_layers, default=0)
        if deepest > target.layers:
            problem = f"sees layer {deepest}, but this target has {target.layers}"
            raise UserError(f"draft: {problem}; {hint}")

    def layers_shown(self, draft: Model | None) -> tuple[int, ...]:
        return feature_layers(draft)

    def init(
        self, setup: Setup, prompts: Sequences, capacity: int, features_BxTxF: Features
    ) -> _State:
        assert features_BxTxF is not None
        R, lengths_B = setup.tree.height + 1, prompts.lengths  # As many tokens as a call can add.
        before = jnp.pad(features_BxTxF, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        cache, _ = run_on_prompts(
            setup.draft, *prompts, capacity + R, before, piece=setup.prompt_piece
        )
        index_BxR = lengths_B[:, None] - 1 - R + jnp.arange(R)
        last = jnp.take_along_axis(features_BxTxF, jnp.maximum(index_BxR, 0)[..., None], axis=1)
        return _State(
            cache=Cache(cache.rows, levels.cache_lengths(lengths_B, R)),
            features=jnp.where(index_BxR[..., None] < 0, 0, last),
        )

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: _State, target_cache: Cache
    ) -> Drafts:
        (cache, features_BxRxF), R = state, state.features.shape[1]
        # In a sequence shorter than R, the features move to the front with their tokens.
        root_B = levels.root_index(sequences.lengths, cache)
        shifted_BxR = jnp.minimum(jnp.arange(R) + R - 1 - root_B[:, None], R - 1)
        seen = jnp.take_along_axis(features_BxRxF, shifted_BxR[..., None], axis=1)
        tokens, p, cache = levels.draw(setup, keys_B, setup.draft, sequences, cache, R, seen)
        state = _State(cache=cache, features=features_BxRxF)
        return Drafts(tokens=tokens, p=p, state=state, target_cache=target_cache)

    def commit(self, setup: Setup, state: _State, verified: Verified) -> _State:
        """Keeps the target's features of the tokens that the call added; the next call recalls them."""
        assert verified.features is not None
        (cache, features_BxRxF), lengths_B = state, verified.after.lengths
        nodes = jnp.pad(verified.path, ((0, 0), (1, 0)))  # The root comes first.
        of_path = jnp.take_along_axis(verified.features, nodes[..., None], axis=1)
        both = jnp.concatenate([features_BxRxF, of_path.astype(features_BxRxF.dtype)], axis=1)
        R = features_BxRxF.shape[1]
        last = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=R)
        return _State(
            cache=Cache(cache.rows, levels.cache_lengths(lengths_B, R)),
            features=jax.vmap(last)(both, lengths_B - verified.lengths_before),
        )
