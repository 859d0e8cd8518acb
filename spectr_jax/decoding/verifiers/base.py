"""Phase 3 of a call (select): what a verifier is, what it returns, and how the walks of verifiers are run.

A walk goes down the tree one level after another. On an accelerator the number of kernels and the stops of the host
decide how long it takes: everything of the size of the vocabulary is computed at all nodes at once, and the number of
levels is static. On a CPU the work decides: nodes are visited only when the walk comes to them.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.models.layers import cpu
from spectr_jax.transport.base import draw
from spectr_jax.transport.types import BoolScalar, FloatScalar, IntScalar, Probs

SMALL_VOCABULARY = 64
"""The largest vocabulary for which a CPU takes as long to start an operation as to compute it."""

UNROLLED = 16
"""The largest number of steps of a walk that are compiled one by one, so that small operations are fused across them."""

State = TypeVar("State")
Result = TypeVar("Result")


class Selection(NamedTuple):
    """The tokens that one call emits for one sequence; those of several have a leading batch dimension.

    Attributes:
      tokens: [height + 1] int32; entries from `emitted` on are unused.
      emitted: [] int32, the number of emitted tokens: the accepted drafts and one more, a correction or a bonus.
      path: [height] int32, the node of each accepted draft.
      drafts: [height + 1] int32, how many drafts there were for each token; 0 for a bonus.
    """

    tokens: Int[Array, "*batch steps"]
    emitted: Int[Array, "*batch"]
    path: Int[Array, "*batch height"]
    drafts: Int[Array, "*batch steps"]


@dataclasses.dataclass(frozen=True)
class Verifier(abc.ABC):
    """Chooses the tokens that one call emits, so that they follow the target's distribution.

    A verifier is a frozen dataclass: equal ones must hash alike, or `generate` compiles again.

    Attributes:
      statistic: what has to be observed of its drafts to predict its tokens per call (`planning.prediction`): "carriers",
        "winners" or "children", and then it has an attribute `plan`; None if nothing of these predicts them.
    """

    statistic: ClassVar[str | None] = None

    @property
    @abc.abstractmethod
    def rule(self) -> str:
        """How siblings must be drafted: one of `drafting.RULES`, or "given" for drafts that a method's drafter finds."""

    def check(self, tree: Tree) -> None:  # noqa: B027
        """Raises `UserError` if this verifier is not exact on `tree`. The default accepts every tree."""

    @abc.abstractmethod
    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        """Returns the tokens that one call emits, for one sequence; consumes `key`."""


def for_each_sequence(
    verifier: Verifier,
    done_B: Bool[Array, " batch"],
    keys_B: Key[Array, " batch"],
    scored_B: ScoredTree,
) -> Selection:
    """Runs `verifier` on each sequence of a batch; consumes `keys_B`. The result for a finished sequence is unused.

    A CPU takes the sequences in turn, so that none waits for a longer path of another. An accelerator, and a CPU with a
    small vocabulary, takes all at once.

    Args:
      verifier: of the method.
      done_B: [B] bool, sequences that are finished.
      keys_B: [B] typed keys.
      scored_B: its arrays have a leading B.
    """
    return for_each_row(scored_B, ~done_B, verifier, keys_B, scored_B)


def in_turn(vocab_size: int) -> bool:
    """Returns whether sequences, and nodes, are best taken one after another: on a CPU, unless the vocabulary is small."""
    return cpu.on_cpu() and vocab_size > SMALL_VOCABULARY


def at_nodes(scored: ScoredTree, function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns `function`, which takes a node: on an accelerator as a lookup in its results at all nodes at once.

    What else the returned function is given, a CPU passes on: values at the node that are known already.
    """
    if in_turn(scored.vocab_size):
        return function
    table = jax.vmap(function)(jnp.arange(scored.tree.size + 1))

    def looked_up(node: IntScalar, *known: Any) -> Result:
        result: Result = jax.tree.map(lambda leaf: leaf[node], table)
        return result

    return looked_up


def for_each_row(
    scored: ScoredTree, wanted: Bool[Array, " rows"], function: Callable[..., Result], *arrays: Any
) -> Result:
    """Returns `function` of each row of the arrays or pytrees; the result of a row that is not `wanted` is unused."""
    if not in_turn(scored.vocab_size):
        return jax.vmap(function)(*arrays)

    def of_row(row: tuple[Any, ...]) -> Result:
        result: Result = jax.lax.cond(
            row[0], lambda: function(*row[1:]), lambda: zeros_like_output(function, *row[1:])
        )
        return result

    results: Result = jax.lax.map(of_row, (wanted, *arrays))
    return results


def repeat(
    scored: ScoredTree,
    times: int,
    alive: Callable[[State], BoolScalar],
    step: Callable[[State], State],
    state: State,
    settles: bool = False,
) -> State:
    """Applies `step` to `state` while it is `alive`, which it is at most `times` times.

    An accelerator takes all steps, so that the host need not ask whether to continue; a state that is not alive stays
    as it is. Pass `settles=True` if `step` leaves such a state unchanged by itself, which saves the selection.
    """
    if in_turn(scored.vocab_size):
        last: State = jax.lax.while_loop(alive, step, state)
        return last

    def step_if_alive(_: IntScalar | int, state: State) -> State:
        if settles:
            return step(state)
        going = alive(state)
        after: State = jax.tree.map(lambda new, old: jnp.where(going, new, old), step(state), state)
        return after

    end: State = jax.lax.fori_loop(0, times, step_if_alive, state, unroll=times <= UNROLLED)
    return end


class Candidates(NamedTuple):
    """The drafts for the token after a node, in the order in which they were drawn.

    Attributes:
      nodes: [k] int32; the children of all nodes that spell the same tokens.
      tokens: [k] int32.
      valid: [k] bool; the others are padding.
    """

    nodes: Int[Array, " k"]
    tokens: Int[Array, " k"]
    valid: Bool[Array, " k"]

    def first(self) -> IntScalar:
        """Returns the first valid node."""
        return self.nodes[jnp.argmax(self.valid)]

    def carrying(self, tree: Tree, token: IntScalar) -> tuple[IntScalar, BoolScalar]:
        """Returns the node at which the walk continues if `token` was chosen, and whether there is one.

        Of several it is one with children, if there is one: the draft model ran on nodes with children only, so the path
        goes through these, and the draft's cache keeps their rows.
        """
        carried = self.valid & (self.tokens == token)
        inner = jnp.asarray(np.isin(np.arange(tree.size + 1), tree.inner))
        return self.nodes[jnp.argmax(jnp.where(carried, 1 + inner[self.nodes], 0))], jnp.any(
            carried
        )


def candidates(scored: ScoredTree, rule: str) -> Callable[[IntScalar], Candidates]:
    """Returns a function of a node that returns its `Candidates`.

    I.i.d. drafts below all nodes that spell the same tokens are i.i.d. drafts of one distribution. Drafts by other rules
    are distinct among siblings, so that no two nodes spell the same tokens.
    """
    tree = scored.tree
    if rule != "iid":
        table = jnp.asarray(tree.children_table)

        def of_node(node: IntScalar) -> Candidates:
            tokens = scored.tokens[table[node]]
            return Candidates(
                nodes=table[node], tokens=tokens, valid=(table[node] >= 0) & (tokens >= 0)
            )

        return of_node
    alike, drawable, depth = scored.spelled_alike(), scored.drawable(), jnp.asarray(tree.depth)
    levels, parent = jnp.asarray(tree.level_table), jnp.asarray(tree.parent)

    def below(node: IntScalar) -> Candidates:
        children = levels[depth[node] + 1]
        valid = (children >= 0) & alike[node, parent[children]] & drawable[children]
        return Candidates(nodes=children, tokens=scored.tokens[children], valid=valid)

    return below


def ending_at(
    scored: ScoredTree, node: IntScalar, token: IntScalar, drafts: Int[Array, " nodes"]
) -> Selection:
    """Returns what a call emits that ends at `node`: the path to it and `token`; `drafts` [N + 1] are those of each node."""
    tree = scored.tree
    depth, path = jnp.asarray(tree.depth)[node], jnp.asarray(tree.paths)[node]
    above = jnp.concatenate([jnp.zeros(1, jnp.int32), path])
    return Selection(
        tokens=jnp.append(scored.tokens[path], 0).at[depth].set(token),
        emitted=depth + 1,
        path=path,
        drafts=jnp.where(jnp.arange(tree.height + 1) <= depth, drafts[above], 0),
    )


def last_token(key: PRNGKeyArray, weights: Probs) -> IntScalar:
    """Draws a token from `weights` [V], or returns -1 where none is positive, as for logits that are NaN; consumes `key`."""
    return jnp.where(jnp.any(weights > 0), draw(key, weights), -1)


def residual_mass(residual: Probs, q: Probs, reached: FloatScalar) -> FloatScalar:
    """Returns the sum of what is left of `reached * q` once the drafts have taken their part.

    Where q is 0 everywhere, the target has no distribution. Then no draft can be accepted, and all of `reached` is left for
    the token -1, which ends the sequence.
    """
    return jnp.where(jnp.any(q > 0), jnp.sum(residual), reached)
