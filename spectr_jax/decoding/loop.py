"""The loop of `generate`: its state, the start from prompts, and one call of the target.

Shape suffixes: B sequences, N + 1 nodes, T tokens of a sequence, S steps of a call.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from spectr_jax.decoding import logprobs, processing
from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.drafters import Drafts, Sequences, Setup, Verified
from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.policy import ends
from spectr_jax.decoding.running import run, run_on_prompts
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.stopping import MATCHED, START
from spectr_jax.decoding.tree import Keys, NodeTokens, PerRow, Tree
from spectr_jax.decoding.verifiers.base import Selection, for_each_row
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.models.cache import Cache, keep
from spectr_jax.transport.types import BoolScalar
from spectr_jax.utils import backend, sharding

SPARE = np.uint32(2**32 - 1)
"""Folded into the key of a call for the random numbers of `observe`."""


class Call(NamedTuple):
    """One call of the target, as `observe` sees it, for one sequence.

    Attributes:
      key: for random numbers in `observe`; not used elsewhere.
      scored: the drafts, with the distributions of both models. Those of the target are undefined
        at nodes without a draft.
      chosen: the emitted tokens and the accepted path.
      eos: the tokens that end the sequence, for `policy.ends`.
    """

    key: Key[Array, "*batch"]
    scored: ScoredTree
    chosen: Selection
    eos: Int[Array, "*batch several"]


Observe: TypeAlias = Callable[[Call], Any]


class Loop(NamedTuple):
    """The state of a generation between calls, for sequences of L committed tokens."""

    sequences: Sequences
    done: Bool[Array, " batch"]  # Whether each sequence has ended.
    calls: PerRow  # The number of target calls of each sequence.
    emitted_per_call: Int[Array, "batch counts"]  # The number of calls that emitted 0, 1, 2, ...
    target_cache: Cache  # Of length L - 1: each call runs on the last token again.
    drafter_state: Any  # Caches of draft models are of length L - R (`levels.cache_lengths`).
    observed: Any = None  # The outputs of `observe`, summed over calls.
    logprobs: Logprobs | None = None  # Of the committed tokens.
    stop_states: PerRow | None = None  # The states of the stop automaton.


class Selected(NamedTuple):
    """The outputs of the target and the verifier in one call."""

    logits: Float[Array, "batch nodes vocab"]  # After the policy's process.
    features: Float[Array, "batch nodes features"] | None  # Those that the drafter asked for.
    cache: Cache
    chosen: Selection
    logprobs: Logprobs | None  # Of the chosen tokens.


def begin(
    setup: Setup,
    prompts: Sequences,
    room: int,
    with_logprobs: bool = False,
    observe: Observe | None = None,
) -> Loop:
    """Runs the models on the prompts; returns the state before the first call.

    `room` is static, the largest number of new tokens of any sequence. With `with_logprobs`, the
    calls record log-probabilities; with `observe`, `call_and_observe` adds its outputs up.
    """
    tree, drafter, (B, T) = setup.tree, setup.drafter, prompts.tokens.shape
    capacity, shown = T + room + tree.size, drafter.layers_shown(setup.draft)
    cache, features = run_on_prompts(
        setup.target, *prompts, capacity, layers_shown=shown, piece=setup.prompt_piece
    )
    tokens = jnp.pad(prompts.tokens, ((0, 0), (0, room + tree.height + 1)))
    none_yet = jnp.zeros(tokens.shape, jnp.float32)
    start = Loop(
        sequences=Sequences(tokens=tokens, lengths=prompts.lengths),
        done=jnp.zeros(B, bool),
        calls=jnp.zeros(B, jnp.int32),
        emitted_per_call=jnp.zeros((B, tree.height + 2), jnp.int32),
        target_cache=Cache(cache.rows, prompts.lengths - 1),
        drafter_state=drafter.init(setup, prompts, capacity, features),
        logprobs=Logprobs(policy=none_yet, model=none_yet) if with_logprobs else None,
        stop_states=None if setup.stop is None else jnp.full(B, START, jnp.int32),
    )
    if observe is None:
        return start
    none = zeros_like_output(lambda: observe_call(observe, call(start, setup)[1]))
    return start._replace(observed=none)


def observe_call(observe: Observe | None, called: Call) -> Any:
    """Returns the outputs of `observe` for each sequence of a call; booleans become integers."""
    observed = None if observe is None else jax.vmap(observe)(called)
    return jax.tree.map(lambda x: x.astype(jnp.int32) if x.dtype == bool else x, observed)


def call_and_observe(loop: Loop, setup: Setup, observe: Observe | None) -> Loop:
    """Returns the state after one call, with the outputs of `observe` added to `observed`.

    Those of finished sequences are not added.
    """
    after, called = call(loop, setup)

    def add(total: Array, new: Array) -> Array:
        done = loop.done.reshape(-1, *[1] * (new.ndim - 1))
        return total + jnp.where(done, 0, new)

    return after._replace(observed=jax.tree.map(add, loop.observed, observe_call(observe, called)))


def call(loop: Loop, setup: Setup) -> tuple[Loop, Call]:
    """Calls the target once for all sequences; returns the next state and the `Call`.

    Finished sequences do not change. Call n of a sequence folds 2 n and 2 n + 1 into its key.
    """
    fold = jax.vmap(jax.random.fold_in)
    draft_keys, select_keys = (fold(setup.keys, 2 * loop.calls + part) for part in (0, 1))
    # Not of a shared key, which would be the same in all calls.
    spare_keys = fold(select_keys, jnp.full(len(select_keys), SPARE))
    if setup.verifier.rule is not None and setup.verifier.rule.shares_key:
        # One race per position decides draft and target: the output does not depend on the draft.
        draft_keys = select_keys = fold(setup.keys, jnp.zeros_like(loop.calls))
    with jax.named_scope("draft"):
        drafts = draft(loop, setup, draft_keys)
    branch = functools.partial(score_and_select, loop, setup, select_keys, drafts)
    if setup.tree.size and not setup.drafter.draws and backend.on_cpu():
        # On an accelerator, the host would wait for the condition.
        drafted = jnp.any((drafts.tokens[:, 1:] >= 0) & ~loop.done[:, None])
        selected = _where_drafted(drafted, branch, setup.tree, drafts.target_cache)
    else:
        selected = branch(setup.tree, drafts.target_cache)
    with jax.named_scope("commit"):
        after = commit(loop, setup, drafts, selected)
    return after, Call(
        key=spare_keys,
        scored=_scored_tree(loop, setup, drafts, setup.tree, selected.logits),
        chosen=selected.chosen,
        eos=setup.policy.eos,
    )


def draft(loop: Loop, setup: Setup, keys_B: Keys) -> Drafts:
    """Phase 1 of a call: returns the tokens of the tree. Consumes `keys_B`."""
    now = loop.sequences, loop.drafter_state, loop.target_cache
    return setup.drafter.draft(setup, keys_B, *now)


def score_and_select(
    loop: Loop, setup: Setup, keys_B: Keys, drafts: Drafts, tree: Tree, cache: Cache
) -> Selected:
    """Phases 2 and 3 of a call: scores a tree and selects tokens. Consumes `keys_B`.

    `tree` is the drafted tree, or its root alone. `cache` is the target's. The target runs once, on
    the last committed token (the root) and all drafted nodes (SpecTr, section 7).
    """
    # The logits after nodes without a draft are unused.
    tokens, nodes = jnp.maximum(drafts.tokens[:, : tree.size + 1], 0), np.arange(tree.size + 1)
    with jax.named_scope("score"):
        shown = setup.drafter.layers_shown(setup.draft)
        lengths_B = loop.sequences.lengths
        raw, features, cache = score(setup.target, tree, tokens, lengths_B, cache, shown)
    with jax.named_scope("select"):
        process = setup.policy.process
        logits = processing.processed(process, tree, nodes, raw, tokens, *loop.sequences)
        scored = _scored_tree(loop, setup, drafts, tree, logits)
        chosen = for_each_row(scored, ~loop.done, setup.verifier, keys_B, scored)
    return Selected(
        logits=logits,
        features=features,
        cache=cache,
        chosen=chosen,
        logprobs=None if loop.logprobs is None else logprobs.of_call(scored, raw, chosen),
    )


def _scored_tree(
    loop: Loop, setup: Setup, drafts: Drafts, tree: Tree, logits_BxNxV: Float[Array, "..."]
) -> ScoredTree:
    return ScoredTree(
        tree=tree,
        shaping=setup.policy.shaping,
        length=loop.sequences.lengths,
        tokens=sharding.whole(drafts.tokens[:, : tree.size + 1]),
        p=drafts.p,
        logits=logits_BxNxV,
        rows=len(logits_BxNxV),
    )


def score(
    target: Any,
    tree: Tree,
    tokens_BxN: NodeTokens,
    lengths_B: PerRow,
    cache: Cache,
    layers_shown: tuple[int, ...] | None = None,
) -> tuple[Float[Array, "batch nodes vocab"], Float[Array, "batch nodes features"] | None, Cache]:
    """Returns the target's logits [B, N + 1, V], its features [B, N + 1, F] or None, and its cache.

    `cache` holds the committed tokens without the root; all nodes are pending in the result.
    """
    # Nodes past the context are never emitted, but a NaN there would get past the mask.
    positions = jnp.minimum(lengths_B[:, None] - 1 + jnp.asarray(tree.depth), target.context - 1)
    visible = jnp.broadcast_to(tree.ancestors, (len(lengths_B), *tree.ancestors.shape))
    return run(target, tokens_BxN, positions, visible, cache, layers_shown=layers_shown)


def _where_drafted(
    drafted: BoolScalar,
    score_and_select: Callable[[Tree, Cache], Selected],
    tree: Tree,
    cache: Cache,
) -> Selected:
    """Returns `score_and_select` of `tree` if anything is `drafted`, else of the root alone.

    In the latter case the outputs for the other nodes are zeros.
    """
    on_tree = functools.partial(score_and_select, tree)
    start = zeros_like_output(on_tree, cache)._replace(cache=cache)

    def on_root(cache: Cache) -> Selected:
        def padded(narrow: Array, wide: Array) -> Array:
            sizes = zip(narrow.shape, wide.shape, strict=True)
            return jnp.pad(narrow, [(0, long - short) for short, long in sizes])

        return jax.tree.map(padded, score_and_select(trees.none(), cache), start)

    def apply_if(
        wanted: BoolScalar, branch: Callable[[Cache], Selected], before: Selected
    ) -> Selected:
        # A loop of at most one iteration updates the cache in place. XLA would copy the cache for
        # each branch of a conditional.
        def step(state: tuple[BoolScalar, Selected]) -> tuple[BoolScalar, Selected]:
            return jnp.zeros((), bool), branch(state[1].cache)

        end: tuple[BoolScalar, Selected]
        end = jax.lax.while_loop(lambda state: state[0], step, (wanted, before))
        return end[1]

    return apply_if(~drafted, on_root, apply_if(drafted, on_tree, start))


def _append(all_BxT: Array, new_BxS: Array, starts_B: PerRow) -> Array:
    update = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
    return update(all_BxT, new_BxS, starts_B)


def commit(loop: Loop, setup: Setup, drafts: Drafts, selected: Selected) -> Loop:
    """Phase 4 of a call: appends the chosen tokens, up to EOS, a stop or the limit.

    The target's cache keeps the accepted path, and the drafter updates its state.
    """
    (tokens_BxT, lengths_B), chosen, states_BxS = loop.sequences, selected.chosen, None
    emitted = jnp.minimum(chosen.emitted, setup.limits - lengths_B)
    is_end, stop_states = ends(chosen.tokens, setup.policy.eos), None
    if setup.stop is not None and loop.stop_states is not None:
        states_BxS = setup.stop.follow(loop.stop_states, chosen.tokens)
        is_end |= states_BxS == MATCHED
    is_end &= jnp.arange(chosen.tokens.shape[1]) < emitted[:, None]
    ended = jnp.any(is_end, axis=1)
    emitted = jnp.where(ended, jnp.argmax(is_end, axis=1) + 1, emitted)
    emitted = emitted.astype(jnp.int32)  # argmax gives int64 with x64.
    if states_BxS is not None:
        stop_states = jnp.take_along_axis(states_BxS, emitted[:, None] - 1, axis=1)[:, 0]
    emitted = jnp.where(loop.done, 0, emitted)
    append = functools.partial(_append, starts_B=lengths_B)
    after = Sequences(tokens=append(tokens_BxT, chosen.tokens), lengths=lengths_B + emitted)
    verified = Verified(
        drafted=drafts.tokens,
        logits=selected.logits,
        features=selected.features,
        path=chosen.path,
        lengths_before=lengths_B,
        after=after,
    )
    # Node i is pending row i. The rows of the root and of a chain are in place already.
    is_chain = setup.tree.size == setup.tree.height
    moved = chosen.path[:, :0] if is_chain else chosen.path
    counted = loop.emitted_per_call.at[jnp.arange(len(emitted)), emitted]
    return Loop(
        sequences=after,
        done=loop.done | ended | (after.lengths >= setup.limits),
        calls=loop.calls + ~loop.done,
        emitted_per_call=counted.add((~loop.done).astype(jnp.int32)),
        target_cache=keep(selected.cache, moved, after.lengths - 1, in_place=1),
        drafter_state=setup.drafter.commit(setup, drafts.state, verified),
        observed=loop.observed,
        logprobs=jax.tree.map(append, loop.logprobs, selected.logprobs),
        stop_states=stop_states,
    )
