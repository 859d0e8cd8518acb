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
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spectr_jax.decoding.drafters import levels
from spectr_jax.decoding.drafters.base import Drafter, Drafts, Sequences, Setup, Verified
from spectr_jax.decoding.running import run_on_prompts
from spectr_jax.decoding.tree import Keys, Tree
from spectr_jax.models.base import feature_layers
from spectr_jax.models.cache import Cache

Recalled: TypeAlias = Float[Array, "batch recalled features"]


class _State(NamedTuple):
    cache: Cache  # The draft's.
    features: Recalled  # The target's, for the last R tokens: those of the token before each.


@dataclasses.dataclass(frozen=True)
class FeatureModel(Drafter):
    """Draws from a draft model that sees the target's features."""

    needs_model: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def features(self, draft: Any) -> tuple[int, ...]:
        """Returns the layers that the draft sees besides the last hidden states."""
        return feature_layers(draft)

    def recalled(self, tree: Tree) -> int:
        """Returns R: the draft runs on as many committed tokens as a call can add."""
        return tree.height + 1

    def init(
        self,
        setup: Setup,
        prompts: Sequences,
        capacity: int,
        features_BxTxF: Float[Array, "batch time features"] | None,
    ) -> _State:
        """See `Drafter.init`."""
        assert features_BxTxF is not None
        R, lengths_B = self.recalled(setup.tree), prompts.lengths
        before = jnp.pad(features_BxTxF, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        cache, _ = run_on_prompts(setup.draft, *prompts, capacity, before)
        cache = dataclasses.replace(cache, lengths=levels.committed_length(lengths_B, R))
        index_BxR = lengths_B[:, None] - 1 - R + jnp.arange(R)
        last = jnp.take_along_axis(features_BxTxF, jnp.maximum(index_BxR, 0)[..., None], axis=1)
        return _State(cache=cache, features=jnp.where(index_BxR[..., None] < 0, 0, last))

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: _State, target_cache: Cache
    ) -> Drafts:
        """See `Drafter.draft`. Consumes `keys_B`."""
        R, (cache, features_BxRxF) = self.recalled(setup.tree), state
        # In a sequence shorter than R, the features move to the front with their tokens.
        root_B = sequences.lengths - 1 - cache.lengths
        shifted_BxR = jnp.minimum(jnp.arange(R) + R - 1 - root_B[:, None], R - 1)
        seen = jnp.take_along_axis(features_BxRxF, shifted_BxR[..., None], axis=1)
        drawn = levels.draw(setup, keys_B, setup.draft, sequences, cache, R, seen)
        state = state._replace(cache=drawn.cache)
        return Drafts(tokens=drawn.tokens, p=drawn.p, state=state, target_cache=target_cache)

    def commit(self, setup: Setup, state: _State, verified: Verified) -> _State:
        """Keeps the features of the tokens that the call added, which the next call recalls."""
        assert verified.features is not None
        (cache, features_BxRxF), lengths_B = state, verified.after.lengths
        nodes = jnp.pad(verified.path, ((0, 0), (1, 0)))  # The root comes first.
        of_path = jnp.take_along_axis(verified.features, jnp.maximum(nodes, 0)[..., None], axis=1)
        both = jnp.concatenate([features_BxRxF, of_path.astype(features_BxRxF.dtype)], axis=1)
        R = features_BxRxF.shape[1]
        last = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=R)
        return _State(
            cache=Cache(cache.rows, levels.committed_length(lengths_B, R)),
            features=jax.vmap(last)(both, lengths_B - verified.before),
        )
