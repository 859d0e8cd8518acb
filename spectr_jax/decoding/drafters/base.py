"""Phase 1 of a call (draft): the interface of drafters.

Shape suffixes: B sequences, N + 1 nodes (the root is node 0), I inner nodes (root included), V
vocabulary, T tokens of a sequence, F features.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spectr_jax.decoding.policy import PolicyRows
from spectr_jax.decoding.stopping import Stop
from spectr_jax.decoding.tree import Keys, NodeTokens, Paths, PerRow, Tokens, Tree
from spectr_jax.decoding.verifiers.base import Verifier
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache
from spectr_jax.models.frozen import Frozen

Features: TypeAlias = Float[Array, "batch time features"] | None


class Setup(NamedTuple):
    """What stays the same during a generation; `Request.setup` returns it."""

    tree: Tree
    drafter: "Drafter"
    verifier: Verifier
    target: Model
    draft: Model | None
    keys: Keys  # One per sequence.
    limits: PerRow  # The largest length of each sequence.
    policy: PolicyRows
    draft_policy: PolicyRows
    stop: Stop | None
    prompt_piece: int | None = None  # Tokens of each prompt at once (`running.piece_length`).


class Sequences(NamedTuple):
    """The committed tokens of a batch."""

    tokens: Tokens  # Entries at `lengths` and later are unused.
    lengths: PerRow

    def last(self) -> Int[Array, "batch 1"]:
        """Returns the last committed tokens [B, 1], the roots of the trees."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)


class Drafts(NamedTuple):
    """The drafts of one call.

    Attributes:
      tokens: [B, N + 1] int32 by node, the last committed token first; -1 means no draft.
      p: [B, I, V], the distribution that the children of each of `tree.inner` were drawn from;
        [B, 0, V] if the drafter does not draw.
      state: the drafter's.
      target_cache: the target's, of unchanged length; returned for an update in place.
    """

    tokens: NodeTokens
    p: Float[Array, "batch inner vocab"]
    state: Any
    target_cache: Cache


class Verified(NamedTuple):
    """What a drafter may learn from one call of the target.

    Attributes:
      drafted: [B, N + 1] int32, the tokens of the tree.
      logits: [B, N + 1, V], the target's after each node, after the policy's `process`. Undefined
        for nodes without a draft.
      features: [B, N + 1, F], the target's, if the drafter asks for them; or None.
      path: [B, height], the accepted nodes.
      lengths_before: [B] int32, the lengths of the sequences before the call.
      after: the sequences after the call.
    """

    drafted: NodeTokens
    logits: Float[Array, "batch nodes vocab"]
    features: Float[Array, "batch nodes features"] | None
    path: Paths
    lengths_before: PerRow
    after: Sequences


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
    """Proposes the tokens of a tree in each call.

    A drafter is a frozen dataclass. Equal drafters must hash alike, or `generate` recompiles. Its
    state is a pytree of arrays with a leading batch dimension, which the loop carries.

    Attributes:
      needs_model: whether it runs a draft model.
      draws: whether siblings are drawn by the verifier's rule, with known distributions `p`. If
        not, they are distinct and are functions of the sequence so far.
    """

    needs_model: ClassVar[bool] = False
    draws: ClassVar[bool] = False

    @property
    def takes_model(self) -> bool:
        """Returns whether it uses a draft model if one is given; by default, if it needs one."""
        return self.needs_model

    def check(self, target: Frozen, draft: Frozen | None) -> None:  # noqa: B027
        """Raises `UserError` unless the models fit this drafter; by default all do."""

    def layers_shown(self, draft: Model | None) -> tuple[int, ...] | None:
        """Returns which features of the target `init` and `commit` get; None, the default, for none.

        Features are the last hidden states, followed by the outputs of these layers.
        """
        return None

    def init(
        self, setup: Setup, prompts: Sequences, capacity: int, features_BxTxF: Features
    ) -> Any:
        """Returns the state after the prompts; None by default.

        Args:
          setup: of the generation.
          prompts: the tokens [B, T] and lengths [B].
          capacity: static; the number of slots that hold any sequence and a tree. A drafter that
            recalls more than two committed tokens in a call needs more.
          features_BxTxF: the target's for each token, if `layers_shown` asks for them.
        """
        return None

    @abc.abstractmethod
    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: Any, target_cache: Cache
    ) -> Drafts:
        """Returns the drafts of one call; consumes `keys_B`."""

    def commit(self, setup: Setup, state: Any, verified: Verified) -> Any:
        """Returns the state after a call; by default unchanged."""
        return state


@dataclasses.dataclass(frozen=True)
class NoDrafts(Drafter):
    """Drafts nothing: each call emits one token of the target."""

    def draft(
        self, setup: Setup, keys_B: Keys, sequences: Sequences, state: Any, target_cache: Cache
    ) -> Drafts:
        return without_p(setup, sequences.last(), state, target_cache)


def without_p(setup: Setup, tokens_BxN: NodeTokens, state: Any, target_cache: Cache) -> Drafts:
    """Returns drafts that are functions of the sequences so far."""
    p = jnp.zeros((len(tokens_BxN), 0, setup.target.vocab_size))
    return Drafts(tokens=tokens_BxN, p=p, state=state, target_cache=target_cache)
