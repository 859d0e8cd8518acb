"""The loop of `generate`: its state, the prefill, and one call of the target.

Shape suffixes: B sequences, T tokens of a sequence.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from spectr_jax.decoding import drafting, features, logprobs, processing, scoring
from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, ends, for_rows
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.stopping import MATCHED, START, Stop
from spectr_jax.decoding.tree import Keys, NodeTokens, PerRow, Tokens, Tree
from spectr_jax.decoding.verifiers.base import Selection, for_each_sequence
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.models.base import Model, features_shown
from spectr_jax.models.cache import Cache
from spectr_jax.models.early_exit import EarlyExit
from spectr_jax.models.frozen import Frozen
from spectr_jax.models.layers import cpu
from spectr_jax.transport.types import BoolScalar, IntScalar

PIECE = 64
"""Prefill runs on at most this many prompt tokens at once, which bounds attention memory."""

Prefilled: TypeAlias = tuple[Cache, Float[Array, "batch padded features"] | None]


class Call(NamedTuple):
    """One call of the target, as `observe` sees it, for one sequence.

    Attributes:
      key: for random numbers in `observe`; not used elsewhere.
      scored: the drafts, with the distributions of both models.
      chosen: the emitted tokens and the accepted path.
    """

    key: Key[Array, "*batch"]
    scored: ScoredTree
    chosen: Selection


class Loop(NamedTuple):
    """The state of a generation between calls."""

    step: IntScalar  # The number of calls so far.
    tokens: Tokens  # The committed tokens of each sequence, then unused room.
    lengths: PerRow  # The number of committed tokens.
    done: Bool[Array, " batch"]  # Whether each sequence has ended.
    target_cache: Cache  # Holds all committed tokens but the last.
    draft_cache: Cache | None  # Of length `drafting.committed_length`.
    features: features.Recalled | None  # The target's, for the last tokens, if the draft sees any.
    calls: PerRow  # The number of target calls of each sequence.
    histogram: Int[Array, "batch counts"]  # The number of calls that emitted 0, 1, 2, ... tokens.
    observed: Any  # The outputs of `observe`, summed over calls.
    logprobs: Logprobs | None = None  # Of the committed tokens.
    stop_states: PerRow | None = None  # The states of the stop automaton.


class _Selected(NamedTuple):
    """The outputs of the target and the verifier."""

    logits: Float[Array, "batch nodes vocab"]
    shown: Float[Array, "batch nodes features"] | None  # The features that the draft sees.
    cache: Cache
    chosen: Selection


def merged(method: Method, target: Frozen, draft: Frozen | None) -> tuple[Any, Any]:
    """Returns the models of target and draft; the draft is None where the method needs none."""
    large = target.merge()
    if method.exit_layer:
        return large, EarlyExit(large, method.exit_layer)
    return large, draft.merge() if draft else None


def prefill(
    method: Method,
    target: Model,
    draft: Model | None,
    prompts_BxT: Tokens,
    lengths_B: PerRow,
    max_new_tokens: int,
    logprobs: bool = False,
    stops: bool = False,
) -> Loop:
    """Runs both models on the prompts; returns the state before the first call.

    Cache rows past the end of a shorter prompt are pending, and are overwritten later.
    """
    B, T = prompts_BxT.shape
    tree, recalled = method.tree, features.recalled(draft, method.tree)
    capacity = T + max_new_tokens + tree.size + recalled
    draft_cache = None
    show = features.wanted(draft) if method.needs_draft else None
    target_cache, shown = _run_on_prompts(target, prompts_BxT, lengths_B, capacity, show=show)
    if draft is not None and method.needs_draft:
        # A token comes with the features of the token before it.
        before = None if shown is None else jnp.pad(shown, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        draft_cache, _ = _run_on_prompts(draft, prompts_BxT, lengths_B, capacity, before)
        draft_lengths_B = drafting.committed_length(lengths_B, recalled)
        draft_cache = dataclasses.replace(draft_cache, lengths=draft_lengths_B)
    tokens = jnp.pad(prompts_BxT, ((0, 0), (0, max_new_tokens + tree.height + 1)))
    none_yet = jnp.zeros(tokens.shape, jnp.float32)
    return Loop(
        step=jnp.zeros((), jnp.int32),
        tokens=tokens,
        lengths=lengths_B,
        done=jnp.zeros(B, bool),
        target_cache=dataclasses.replace(target_cache, lengths=lengths_B - 1),
        draft_cache=draft_cache,
        features=None if shown is None else features.at_end(shown, lengths_B, recalled),
        calls=jnp.zeros(B, jnp.int32),
        histogram=jnp.zeros((B, tree.height + 2), jnp.int32),
        observed=None,
        logprobs=Logprobs(policy=none_yet, model=none_yet) if logprobs else None,
        stop_states=jnp.full(B, START, jnp.int32) if stops else None,
    )


def _run_on_prompts(
    model: Model,
    prompts_BxT: Tokens,
    lengths_B: PerRow,
    capacity: int,
    before_BxTxE: Float[Array, "batch given_time given_features"] | None = None,
    show: tuple[int, ...] | None = None,
) -> Prefilled:
    """Runs a model on the prompts, in pieces of at most `PIECE` tokens.

    Returns the cache after them, and the features of all tokens, as `show` says in
    `features.extend`. `before_BxTxE` are the features that the model sees.
    """
    B, T = prompts_BxT.shape
    pieces = -(-T // PIECE)
    width = T if pieces == 1 else PIECE

    def pad(rows_BxT: Array) -> Array:
        missing = pieces * width - rows_BxT.shape[1]
        return jnp.pad(rows_BxT, ((0, 0), (0, missing), *[(0, 0)] * (rows_BxT.ndim - 2)))

    padded: Any = jax.tree.map(pad, (prompts_BxT, before_BxTxE))

    def extend(number: IntScalar | int, carry: Prefilled) -> Prefilled:
        cache, shown = carry
        first = number * width
        piece = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=width, axis=1)
        tokens, before = jax.tree.map(lambda rows: piece(rows, first), padded)
        # Padding may exceed the context; a NaN embedding there would get past the mask.
        positions = jnp.minimum(first + jnp.arange(width), model.context - 1)
        positions = jnp.broadcast_to(positions, (B, width))
        visible = jnp.broadcast_to(np.tri(width, dtype=bool), (B, width, width))
        cache = dataclasses.replace(cache, lengths=jnp.full(B, first, jnp.int32))
        _, hidden, cache = features.extend(
            model, tokens, positions, visible, cache, features_BxNxE=before, show=show
        )
        if shown is not None and hidden is not None:
            hidden = hidden.astype(shown.dtype)
            shown = jax.lax.dynamic_update_slice_in_dim(shown, hidden, first, axis=1)
        return cache, shown

    F = 0 if show is None else (1 + len(show)) * features_shown(model)
    cache = model.init_cache(B, max(capacity, pieces * width))
    start = cache, jnp.zeros((B, pieces * width, F), jnp.float32) if F else None
    if pieces == 1:
        return extend(0, start)
    pieces_used = (jnp.max(lengths_B) + width - 1) // width
    end: Prefilled = jax.lax.fori_loop(0, pieces_used, extend, start)
    return end


def observe_call(observe: Callable[[Call], Any] | None, call: Call) -> Any:
    """Returns the outputs of `observe` for each sequence of a call; booleans become integers."""
    observed = None if observe is None else jax.vmap(observe)(call)
    return jax.tree.map(lambda x: x.astype(jnp.int32) if x.dtype == bool else x, observed)


def add_observed(loop: Loop, observe: Callable[[Call], Any] | None, call: Call) -> Any:
    """Returns `loop.observed` plus the outputs of `observe` for the sequences that are not done."""

    def add(total: Array, new: Array) -> Array:
        done = loop.done.reshape(-1, *[1] * (new.ndim - 1))
        return total + jnp.where(done, 0, new)

    return jax.tree.map(add, loop.observed, observe_call(observe, call))


def call(
    loop: Loop,
    method: Method,
    target: Model,
    draft: Model | None,
    keys_B: Keys,
    limits_B: PerRow,
    policy: Policy,
    draft_policy: Policy | None = None,
    stop: Stop | None = None,
) -> tuple[Loop, Call]:
    """Calls the target once for all sequences; returns the next state and the `Call`.

    Finished sequences do not change.
    """
    tree = method.tree
    policy = for_rows(policy, len(loop.lengths))
    draft_policy = policy if draft_policy is None else for_rows(draft_policy, len(loop.lengths))
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    draft_keys, select_keys = fold(keys_B, 2 * loop.step), fold(keys_B, 2 * loop.step + 1)
    if method.verifier.rule is not None and method.verifier.rule.shares_key:
        # One race per position decides draft and target: the output does not depend on the draft.
        draft_keys, select_keys = fold(keys_B, 0), fold(keys_B, 0)

    with jax.named_scope("draft"):
        tokens_BxN, p, loop = _draft(loop, method, target, draft, draft_keys, draft_policy)

    def scored(tree: Tree, logits: Float[Array, "batch nodes vocab"]) -> ScoredTree:
        tokens, nodes = tokens_BxN[:, : tree.size + 1], np.arange(tree.size + 1)
        committed = jnp.maximum(tokens, 0), loop.tokens, loop.lengths
        logits = processing.at_nodes(policy, tree, nodes, logits, *committed)
        return ScoredTree(
            tree=tree, policy=policy, length=loop.lengths, tokens=tokens, p=p, logits=logits
        )

    def score_and_select(tree: Tree, cache: Cache) -> _Selected:
        with jax.named_scope("score"):
            show = None if loop.features is None else features.wanted(draft)
            # The logits after nodes without a draft are unused.
            tokens = jnp.maximum(tokens_BxN[:, : tree.size + 1], 0)
            logits, shown, cache = scoring.score(target, tree, tokens, loop.lengths, cache, show)
        with jax.named_scope("select"):
            ready = scored(tree, logits)
            chosen = for_each_sequence(method.verifier, loop.done, select_keys, ready)
        return _Selected(logits, shown, cache, chosen)

    if method.drafter is not None and cpu.on_cpu():  # On an accelerator, the host would wait.
        drafted = jnp.any((tokens_BxN[:, 1:] >= 0) & ~loop.done[:, None])
        selected = _where_drafted(drafted, score_and_select, tree, loop.target_cache)
    else:
        selected = score_and_select(tree, loop.target_cache)
    logits, shown, target_cache, chosen = selected
    with jax.named_scope("commit"):
        scored_loop = loop._replace(target_cache=target_cache)
        after = _commit(scored_loop, tree, chosen, draft, limits_B, policy, stop)
        if loop.features is not None and shown is not None:
            added = shown, chosen.path, after.lengths - loop.lengths
            after = after._replace(features=features.after_call(loop.features, *added))
        if loop.logprobs is not None:
            new = logprobs.of_call(scored(tree, logits), logits, chosen)
            write = functools.partial(_append, starts_B=loop.lengths)
            after = after._replace(logprobs=jax.tree.map(write, loop.logprobs, new))
    spare_keys = fold(fold(keys_B, 2 * loop.step + 1), np.uint32(2**32 - 1))
    return after, Call(key=spare_keys, scored=scored(tree, logits), chosen=chosen)


def _where_drafted(
    drafted: BoolScalar,
    score_and_select: Callable[[Tree, Cache], _Selected],
    tree: Tree,
    cache: Cache,
) -> _Selected:
    """Returns `score_and_select` of `tree` if anything is `drafted`, else of the root alone.

    In the latter case the outputs for the other nodes are zeros.
    """
    on_tree = functools.partial(score_and_select, tree)
    start = zeros_like_output(on_tree, cache)._replace(cache=cache)

    def on_root(cache: Cache) -> _Selected:
        def padded(narrow: Array, wide: Array) -> Array:
            sizes = zip(narrow.shape, wide.shape, strict=True)
            return jnp.pad(narrow, [(0, long - short) for short, long in sizes])

        selected: _Selected = jax.tree.map(padded, score_and_select(trees.none(), cache), start)
        return selected

    def apply_if(
        wanted: BoolScalar, branch: Callable[[Cache], _Selected], before: _Selected
    ) -> _Selected:
        # A loop of at most one iteration updates the cache in place. XLA would copy the cache for
        # each branch of a conditional.
        def step(state: tuple[BoolScalar, _Selected]) -> tuple[BoolScalar, _Selected]:
            return jnp.zeros((), bool), branch(state[1].cache)

        end: tuple[BoolScalar, _Selected]
        end = jax.lax.while_loop(lambda state: state[0], step, (wanted, before))
        return end[1]

    return apply_if(~drafted, on_root, apply_if(drafted, on_tree, start))


def _append(all_BxT: Array, new_BxS: Array, starts_B: PerRow) -> Array:
    update = jax.vmap(functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0))
    updated: Array = update(all_BxT, new_BxS, starts_B)
    return updated


def _draft(
    loop: Loop, method: Method, target: Model, draft: Model | None, keys_B: Keys, policy: Policy
) -> tuple[NodeTokens, Float[Array, "batch inner vocab"], Loop]:
    """Returns the tree's tokens, the draft distributions, and the state with the drafts' caches."""
    if method.drafter is not None or not method.tree.size:
        tokens_BxN = jnp.take_along_axis(loop.tokens, loop.lengths[:, None] - 1, axis=1)
        if method.drafter is not None and method.tree.size:
            find = functools.partial(method.drafter, method.tree)
            found = jax.vmap(find)(loop.tokens, loop.lengths)
            tokens_BxN = jnp.concatenate([tokens_BxN, found], axis=1)
        return tokens_BxN, jnp.zeros((len(tokens_BxN), 0, target.vocab_size)), loop
    cache = loop.draft_cache
    if method.exit_layer:  # The draft temporarily uses the target's cache: it has the same rows.
        draft_lengths_B = drafting.committed_length(loop.lengths)
        cache = dataclasses.replace(loop.target_cache, lengths=draft_lengths_B)
    rule = method.verifier.rule
    assert draft is not None and cache is not None and rule is not None
    committed = loop.tokens, loop.lengths, cache, loop.features
    tokens_BxN, p, cache = drafting.draft(keys_B, draft, rule, method.tree, policy, *committed)
    if method.exit_layer:
        cache = dataclasses.replace(cache, lengths=loop.target_cache.lengths)
        return tokens_BxN, p, loop._replace(target_cache=cache)
    return tokens_BxN, p, loop._replace(draft_cache=cache)


def _commit(
    loop: Loop,
    tree: Tree,
    chosen: Selection,
    draft: Model | None,
    limits_B: PerRow,
    policy: Policy,
    stop: Stop | None,
) -> Loop:
    """Appends the chosen tokens, up to EOS, a stop or the limit, and commits the accepted path."""
    emitted = jnp.minimum(chosen.emitted, limits_B - loop.lengths)
    is_end, stop_states, states_BxS = ends(chosen.tokens, policy), loop.stop_states, None
    if stop is not None and stop_states is not None:
        states_BxS = stop.follow(stop_states, chosen.tokens)
        is_end |= states_BxS == MATCHED
    is_end &= jnp.arange(chosen.tokens.shape[1]) < emitted[:, None]
    ended = jnp.any(is_end, axis=1)
    emitted = jnp.where(ended, jnp.argmax(is_end, axis=1) + 1, emitted)
    emitted = emitted.astype(jnp.int32)  # argmax gives int64 with x64.
    if states_BxS is not None:
        stop_states = jnp.take_along_axis(states_BxS, emitted[:, None] - 1, axis=1)[:, 0]
    emitted = jnp.where(loop.done, 0, emitted)
    lengths = loop.lengths + emitted
    draft_cache = loop.draft_cache
    if draft is not None and draft_cache is not None:
        draft_cache = drafting.commit(draft, draft_cache, tree, chosen.path, loop.lengths, lengths)
    counted = loop.histogram.at[jnp.arange(len(lengths)), emitted]
    return loop._replace(
        step=loop.step + 1,
        tokens=_append(loop.tokens, chosen.tokens, loop.lengths),
        lengths=lengths,
        done=loop.done | ended | (lengths >= limits_B),
        target_cache=scoring.commit(loop.target_cache, tree, chosen.path, lengths),
        draft_cache=draft_cache,
        stop_states=stop_states,
        calls=loop.calls + ~loop.done,
        histogram=counted.add((~loop.done).astype(jnp.int32)),
    )
