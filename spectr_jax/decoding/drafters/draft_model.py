"""A draft model: it fills the tree level by level (SpecTr, section 7)."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from spectr_jax.decoding.drafters import levels
from spectr_jax.decoding.drafters.base import Drafter, Drafts, Features, Sequences, Setup, Verified
from spectr_jax.decoding.running import run_on_prompts
from spectr_jax.decoding.tree import Keys
from spectr_jax.models.cache import Cache, keep


@dataclasses.dataclass(frozen=True)
class DraftModel(Drafter):
    """Draws from a draft model; its state is the model's KV cache."""

    needs_model: ClassVar[bool] = True
    draws: ClassVar[bool] = True

    def init(
        self, setup: Setup, prompts: Sequences, capacity: int, features_BxTxF: Features
    ) -> Cache:
        cache, _ = run_on_prompts(setup.draft, *prompts, capacity, piece=setup.prompt_piece)
        return dataclasses.replace(cache, lengths=levels.cache_lengths(prompts.lengths))

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: Cache, target_cache: Cache
    ) -> Drafts:
        tokens, p, cache = levels.draw(setup, keys_B, setup.draft, sequences, state)
        return Drafts(tokens=tokens, p=p, state=cache, target_cache=target_cache)

    def commit(self, setup: Setup, state: Cache, verified: Verified) -> Cache:
        """Keeps the accepted path, except its last node, in the cache.

        The last node may be a leaf, on which the draft has not run, so the next call recalls it.
        The pending rows are: recalled token 0, recalled token 1, then the inner nodes below the
        root. The root is the last recalled token, and token 0 is already in place.
        """
        path_BxD, height = verified.path, verified.path.shape[1]
        root_B = levels.root_index(verified.lengths_before, state)
        index_D = jnp.arange(1, height + levels.RECALLED)
        below_root = index_D - root_B[:, None] - 1
        nodes = jnp.take_along_axis(path_BxD, jnp.clip(below_root, 0, height - 1), axis=1)
        of_nodes = levels.RECALLED + jnp.asarray(setup.tree.inner_rank)[nodes] - 1
        pending = jnp.where(below_root < 0, index_D, of_nodes)
        return keep(state, pending, levels.cache_lengths(verified.after.lengths), in_place=1)
