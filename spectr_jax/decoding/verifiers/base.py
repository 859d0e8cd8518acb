"""Phase 3 of a call (select): the verifier interface, and helpers that run a verifier's walk.

A walk descends the tree level by level, along nodes that have children. On an accelerator, kernel
launches and host syncs dominate its time: everything of the size of the vocabulary is computed at
all these nodes at once, and the number of steps is static. If that would take much memory, and on a
CPU, where arithmetic dominates, a node is computed when the walk reaches it (by `Layer`, all nodes
of a level).
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.transport.draws import draw
from spectr_jax.transport.rules import Rule
from spectr_jax.transport.types import BoolScalar, FloatScalar, IntScalar, Probs
from spectr_jax.utils import backend, sharding

SMALL_VOCABULARY = 64
"""The largest vocabulary for which launch overhead dominates on a CPU too."""

LARGE = 2**28
"""Bytes of a float32 table [sequences, nodes, V] on a device from which nodes are not computed all
at once."""

UNROLLED = 16
"""Walks of at most this many steps are unrolled, so that XLA fuses operations across steps."""

State = TypeVar("State")
Result = TypeVar("Result")


class Selection(NamedTuple):
    """The tokens that one call emits for one sequence; for a batch, all shapes have a leading B.

    Attributes:
      tokens: [height + 1] int32; entries at `emitted` and later are unused.
      emitted: [] int32, the number of accepted drafts plus one for the correction or bonus token.
      path: [height] int32, the node of each accepted draft.
      draft_counts: [height + 1] int32, the number of drafts for each token; 0 for a bonus.
    """

    tokens: Int[Array, "*batch steps"]
    emitted: Int[Array, "*batch"]
    path: Int[Array, "*batch height"]
    draft_counts: Int[Array, "*batch steps"]


@dataclasses.dataclass(frozen=True)
class Verifier(abc.ABC):
    """Chooses the tokens that one call emits, so that they follow the target's distribution.

    A verifier is a frozen dataclass. Equal verifiers must hash alike, or `generate` recompiles.
    """

    @property
    @abc.abstractmethod
    def rule(self) -> Rule | None:
        """Returns the drafting rule; None for drafts that are functions of the sequence so far."""

    def check(self, tree: Tree) -> None:  # noqa: B027
        """Raises `UserError` if this verifier is not exact on `tree`; by default it accepts all."""

    @abc.abstractmethod
    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        """Returns the tokens that one call emits, for one sequence; consumes `key`."""


def in_turn(vocab_size: int) -> bool:
    """Returns whether sequences and nodes run one after another: on a CPU, unless V is small."""
    return backend.on_cpu() and vocab_size > SMALL_VOCABULARY


def is_large(scored: ScoredTree) -> bool:
    """Returns whether a table of the size of the vocabulary at all nodes exceeds `LARGE` bytes."""
    numbers = scored.rows * (scored.tree.size + 1) * scored.vocab_size
    return 4 * numbers > LARGE * sharding.shards_of(scored.vocab_size)


def at_nodes(scored: ScoredTree, function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns a function of a node that has children; elsewhere its result is undefined.

    On a CPU, and if a table would be large, it is `function` itself. Otherwise it looks up the
    results of `function` at all these nodes. `function` takes a node and, optionally, intermediate
    results of the caller at that node, which save it work. The lookup ignores them.
    """
    tree = scored.tree
    if in_turn(scored.vocab_size) or is_large(scored) or not tree.size:
        return function
    table = jax.vmap(function)(jnp.asarray(tree.inner, jnp.int32))

    def looked_up(node: IntScalar, *intermediate: Any) -> Result:
        rank = jnp.asarray(tree.inner_rank)[node]
        return jax.tree.map(lambda leaf: leaf[rank], table)

    return looked_up


def for_each_row(
    scored: ScoredTree, wanted: Bool[Array, " rows"], function: Callable[..., Result], *arrays: Any
) -> Result:
    """Returns `function` of each row of `arrays`; the result of a row not `wanted` is unused.

    A CPU takes the rows one after another, so that none waits for another's longer path. An
    accelerator, or a CPU with a small vocabulary, takes all at once.
    """
    if not in_turn(scored.vocab_size):
        return jax.vmap(function)(*arrays)

    def of_row(row: tuple[Any, ...]) -> Any:
        is_wanted, *values = row
        none = functools.partial(zeros_like_output, function)
        return jax.lax.cond(is_wanted, function, none, *values)

    return jax.lax.map(of_row, (wanted, *arrays))


def if_wanted(
    scored: ScoredTree, wanted: BoolScalar, function: Callable[[], Array], otherwise: Array
) -> Array:
    """Returns `function()` if it is `wanted`, which only a CPU checks first, or `otherwise`."""
    if in_turn(scored.vocab_size):
        return jax.lax.cond(wanted, function, lambda: otherwise)
    return jnp.where(wanted, function(), otherwise)


def repeat(
    scored: ScoredTree,
    times: int,
    alive: Callable[[State], BoolScalar],
    step: Callable[[State], State],
    state: State,
    absorbing: bool = False,
) -> State:
    """Returns `state` after applying `step` while it is `alive`, at most `times` times.

    An accelerator takes all `times` steps, so that the host need not decide whether to continue,
    and keeps a state that is not alive. Pass `absorbing=True` if `step` itself leaves such a state
    unchanged, which saves the selection.
    """
    if in_turn(scored.vocab_size):
        return jax.lax.while_loop(alive, step, state)

    def step_if_alive(_: IntScalar | int, state: State) -> State:
        if absorbing:
            return step(state)
        is_alive, after = alive(state), step(state)
        return jax.tree.map(lambda new, old: jnp.where(is_alive, new, old), after, state)

    # In an unrolled loop the compiler may compute several steps' nodes at once.
    unroll = times <= UNROLLED and not is_large(scored)
    return jax.lax.fori_loop(0, times, step_if_alive, state, unroll=unroll)


class Candidates(NamedTuple):
    """The drafts for the token after a node, in the order in which they were drawn."""

    nodes: Int[Array, " k"]  # Children; of all nodes that spell the same tokens, if i.i.d.
    tokens: Int[Array, " k"]
    live: Bool[Array, " k"]  # Where the walk may continue; other entries are padding.
    valid: Bool[Array, " k"]  # Live, and p > 0: a plan sees no others. If i.i.d., all that live.

    def first(self) -> IntScalar:
        """Returns the first live node."""
        return self.nodes[jnp.argmax(self.live)]

    def carrying(self, tree: Tree, token: IntScalar) -> tuple[IntScalar, BoolScalar]:
        """Returns the node where the walk continues after `token`, and whether there is one.

        A node with children is preferred: the draft model ran only there, so the path goes through
        rows that the draft's cache has.
        """
        carried = self.live & (self.tokens == token)
        best = jnp.argmax(jnp.where(carried, 1 + jnp.asarray(tree.is_inner)[self.nodes], 0))
        return self.nodes[best], jnp.any(carried)


def candidates(scored: ScoredTree, rule: Rule | None) -> Callable[[IntScalar], Candidates]:
    """Returns a function from a node to its `Candidates`.

    If drafts may repeat, the drafts below all nodes that spell the same tokens are drafts from one
    distribution. Siblings that are distinct, as without a rule, never spell the same tokens; once
    the support of p is exhausted, they have p = 0, but the walk may continue there.
    """
    tree, drawable = scored.tree, scored.draft_probability() > 0
    if rule is None or rule.distinct:
        table = jnp.asarray(tree.children_table)

        def children(node: IntScalar) -> Candidates:
            nodes = table[node]
            tokens, live = scored.tokens[nodes], (nodes >= 0) & (scored.tokens[nodes] >= 0)
            return Candidates(nodes=nodes, tokens=tokens, live=live, valid=live & drawable[nodes])

        return children
    alike, depth = scored.spelled_alike(), jnp.asarray(tree.depth)
    levels, parent = jnp.asarray(tree.level_table), jnp.asarray(tree.parent)

    def below(node: IntScalar) -> Candidates:
        nodes = levels[depth[node] + 1]
        live = (nodes >= 0) & alike[node, parent[nodes]] & drawable[nodes]
        return Candidates(nodes=nodes, tokens=scored.tokens[nodes], live=live, valid=live)

    return below


def counts(scored: ScoredTree, below: Callable[[IntScalar], Candidates]) -> Int[Array, " nodes"]:
    """Returns [N + 1], the number of drafts `below` each node."""

    def count(node: IntScalar) -> IntScalar:
        return jnp.sum(below(node).live, dtype=jnp.int32)

    return jax.vmap(count)(jnp.arange(scored.tree.size + 1))


def ending_at(
    scored: ScoredTree, node: IntScalar, token: IntScalar, draft_counts: Int[Array, " nodes"]
) -> Selection:
    """Returns the `Selection` that emits the path to `node`, then `token`.

    `draft_counts` [N + 1] is the number of drafts at each node.
    """
    tree = scored.tree
    depth, path = jnp.asarray(tree.depth)[node], jnp.asarray(tree.paths)[node]
    above = jnp.concatenate([jnp.zeros(1, jnp.int32), path])
    return Selection(
        tokens=jnp.append(scored.tokens[path], 0).at[depth].set(token),
        emitted=depth + 1,
        path=path,
        draft_counts=jnp.where(jnp.arange(tree.height + 1) <= depth, draft_counts[above], 0),
    )


def last_token(key: PRNGKeyArray, weights: Probs) -> IntScalar:
    """Draws a token from `weights` [V], or -1 if none is positive (NaN logits); consumes `key`."""
    return jnp.where(jnp.any(weights > 0), draw(key, weights), -1)


def residual_mass(residual: Probs, q: Probs, reached: FloatScalar) -> FloatScalar:
    """Returns the sum of `residual`, what the drafts leave of `reached * q`.

    If q is 0 everywhere, the target has no distribution and no draft can be accepted. Then all of
    `reached` is left for the token -1, which ends the sequence.
    """
    return jnp.where(jnp.any(q > 0), jnp.sum(residual), reached)
