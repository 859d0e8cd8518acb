"""What `generate` repeats: the state of a decoding, its start on the prompts, and one call of the target.

Shape suffixes: B sequences, T tokens of a sequence.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from spectr_jax.decoding import drafting, features, logprobs, processing, scoring
from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, ends, for_rows
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.stopping import MATCHED, START, Stop
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers.base import Selection, for_each_sequence
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.models.base import Model, features_shown
from spectr_jax.models.cache import Cache
from spectr_jax.models.early_exit import EarlyExit
from spectr_jax.models.frozen import Frozen
from spectr_jax.models.layers import cpu
from spectr_jax.transport.types import BoolScalar, IntScalar

PIECE = 64
"""The most tokens of a prompt that the models run on at once: the memory of attention goes by it."""


class Call(NamedTuple):
    """What `observe` is given of one call, for one sequence.

    Attributes:
      key: for random numbers in `observe`; not used elsewhere.
      scored: the drafts, with the distributions of both models.
      chosen: the tokens, the path and the numbers of drafts.
    """

    key: Key[Array, "*batch"]
    scored: ScoredTree
    chosen: Selection


class Loop(NamedTuple):
    """The state of a decoding between calls.

    Attributes:
      step: the number of calls so far.
      tokens: the committed tokens of each sequence, with room for the rest.
      lengths: the number of committed tokens.
      done: whether a sequence has ended.
      target_cache: holds all committed tokens but the last.
      draft_cache: as `drafting.committed_length` says; None where no draft model is used.
      features: the target's features that come with the last tokens, for a draft that sees them; else None.
      calls: those of the target that each sequence took.
      histogram: how many calls emitted 0, 1, 2, ... tokens.
      observed: sums over the calls of what is observed; None for nothing.
      logprobs: of the committed tokens; None if they are not wanted.
      stop_states: of the automaton of stop sequences; None if there are none.
    """

    step: IntScalar
    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " batch"]
    done: Bool[Array, " batch"]
    target_cache: Cache
    draft_cache: Cache | None
    features: Float[Array, "batch recalled features"] | None
    calls: Int[Array, " batch"]
    histogram: Int[Array, "batch counts"]
    observed: Any
    logprobs: Logprobs | None = None
    stop_states: Int[Array, " batch"] | None = None


def merged(method: Method, target: Frozen, draft: Frozen | None) -> tuple[Any, Any]:
    """Returns the models of target and draft."""
    large = target.merge()
    if method.exit_layer:
        return large, EarlyExit(large, method.exit_layer)
    return large, draft.merge() if draft else None


class _Selected(NamedTuple):
    """What the target and the verifier make of the drafts of a call.

    Attributes:
      logits: of the target at the nodes.
      shown: the target's features, for a draft that sees them.
      cache: the target's, with the nodes pending.
      chosen: the tokens.
    """

    logits: Float[Array, "batch nodes vocab"]
    shown: Float[Array, "batch nodes features"] | None
    cache: Cache
    chosen: Selection


def prefill(
    method: Method,
    target: Model,
    draft: Model | None,
    prompts_BxT: Int[Array, "batch time"],
    lengths_B: Int[Array, " batch"],
    max_new_tokens: int,
    logprobs: bool = False,
    stops: bool = False,
) -> Loop:
    """Runs both models on the prompts, and returns the state before the first call.

    Cache rows beyond the end of a shorter prompt are pending, and overwritten later.
    """
    B, T = prompts_BxT.shape
    tree = method.tree
    recalled = features.recalled(draft, tree)
    capacity = T + max_new_tokens + tree.size + recalled
    last_features, draft_cache = None, None
    own = draft if method.needs_draft else None
    show = None if own is None else features.wanted(own)
    target_cache, shown = _run_on_prompts(target, prompts_BxT, lengths_B, capacity, show=show)
    if own is not None:
        before = None if shown is None else features.before(shown)
        draft_cache, _ = _run_on_prompts(own, prompts_BxT, lengths_B, capacity, before)
        draft_cache = dataclasses.replace(
            draft_cache, lengths=drafting.committed_length(lengths_B, recalled)
        )
        last_features = None if shown is None else features.at_end(shown, lengths_B, recalled)
    tokens = jnp.pad(prompts_BxT, ((0, 0), (0, max_new_tokens + tree.height + 1)))
    return Loop(
        step=jnp.zeros((), jnp.int32),
        tokens=tokens,
        lengths=lengths_B,
        done=jnp.zeros(B, bool),
        target_cache=dataclasses.replace(target_cache, lengths=lengths_B - 1),
        draft_cache=draft_cache,
        features=last_features,
        calls=jnp.zeros(B, jnp.int32),
        histogram=jnp.zeros((B, tree.height + 2), jnp.int32),
        observed=None,
        logprobs=Logprobs(jnp.zeros(tokens.shape), jnp.zeros(tokens.shape)) if logprobs else None,
        stop_states=jnp.full(B, START, jnp.int32) if stops else None,
    )


def _run_on_prompts(
    model: Model,
    prompts_BxT: Int[Array, "batch time"],
    lengths_B: Int[Array, " batch"],
    capacity: int,
    before_BxTxE: Float[Array, "batch given_time given_features"] | None = None,
    show: tuple[int, ...] | None = None,
) -> tuple[Cache, Float[Array, "batch padded features"] | None]:
    """Runs a model on the prompts, in pieces of at most `PIECE` tokens.

    Returns the cache after them, and the features of all tokens if the model shall `show` them. `before_BxTxE` are those
    that come with the tokens.
    """
    B, T = prompts_BxT.shape
    pieces = -(-T // PIECE)
    width = T if pieces == 1 else PIECE
    padded_BxT = _padded(prompts_BxT, pieces * width)
    padded_BxTxE = None if before_BxTxE is None else _padded(before_BxTxE, pieces * width)

    def extend(
        number: IntScalar | int, carry: tuple[Cache, Float[Array, "batch padded features"] | None]
    ) -> tuple[Cache, Float[Array, "batch padded features"] | None]:
        cache, shown = carry
        first = number * width
        piece = functools.partial(
            jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=width, axis=1
        )
        before = None if padded_BxTxE is None else piece(padded_BxTxE)
        cache, hidden = _run_on_piece(model, piece(padded_BxT), first, cache, before, show)
        if shown is not None and hidden is not None:
            shown = jax.lax.dynamic_update_slice_in_dim(
                shown, hidden.astype(shown.dtype), first, axis=1
            )
        return cache, shown

    F = 0 if show is None else (1 + len(show)) * features_shown(model)
    cache = model.init_cache(B, max(capacity, pieces * width))
    start = cache, jnp.zeros((B, pieces * width, F), jnp.float32) if F else None
    if pieces == 1:
        return extend(0, start)
    pieces_used = (jnp.max(lengths_B) + width - 1) // width
    end: tuple[Cache, Array | None] = jax.lax.fori_loop(0, pieces_used, extend, start)
    return end


def _padded(
    rows_BxT: Shaped[Array, "batch time *row"], length: int
) -> Shaped[Array, "batch padded *row"]:
    """Returns the rows of each sequence, padded with zeros to `length`."""
    return jnp.pad(
        rows_BxT, ((0, 0), (0, length - rows_BxT.shape[1]), *[(0, 0)] * (rows_BxT.ndim - 2))
    )


def _run_on_piece(
    model: Model,
    tokens_BxP: Int[Array, "batch piece"],
    first: IntScalar | int,
    cache: Cache,
    before_BxPxE: Float[Array, "batch piece given_features"] | None,
    show: tuple[int, ...] | None,
) -> tuple[Cache, Float[Array, "batch piece features"] | None]:
    """Runs a model on tokens of the prompts, `first` and those behind it; returns the cache and the tokens' features."""
    B, P = tokens_BxP.shape
    visible = jnp.broadcast_to(np.tri(P, dtype=bool), (B, P, P))
    # Padding may be longer than the context, and a model's embedding of a position past it NaN, which no mask hides.
    positions = jnp.broadcast_to(jnp.minimum(first + jnp.arange(P), model.context - 1), (B, P))
    cache = dataclasses.replace(cache, lengths=jnp.full(B, first, jnp.int32))
    _, hidden, cache = features.extend(
        model, tokens_BxP, positions, visible, cache, features_BxNxE=before_BxPxE, show=show
    )
    return cache, hidden


def observe_call(observe: Callable[[Call], Any], call: Call) -> Any:
    """Returns what `observe` returns for each sequence of a call."""

    observed = jax.vmap(observe)(call)
    # Sums of truth values are counts.
    return jax.tree.map(lambda x: x.astype(jnp.int32) if x.dtype == bool else x, observed)


def add_observed(loop: Loop, observe: Callable[[Call], Any] | None, call: Call) -> Any:
    """Returns the sums with this call's values added, for sequences that are not done."""
    if observe is None:
        return None

    def add(total: Array, new: Array) -> Array:
        done = loop.done.reshape(-1, *[1] * (new.ndim - 1))
        return total + jnp.where(done, 0, new)

    return jax.tree.map(add, loop.observed, observe_call(observe, call))


def call(
    loop: Loop,
    method: Method,
    target: Model,
    draft: Model | None,
    keys_B: Key[Array, " batch"],
    limits_B: Int[Array, " batch"],
    policy: Policy,
    draft_policy: Policy | None = None,
    stop: Stop | None = None,
) -> tuple[Loop, Call]:
    """Calls the target once for all sequences, and returns the state after it and what `observe` is given of it.

    Finished sequences do not change.
    """
    tree = method.tree
    policy = for_rows(policy, len(loop.lengths))
    draft_policy = policy if draft_policy is None else for_rows(draft_policy, len(loop.lengths))
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    if method.verifier.rule == "race":
        # A race belongs to a position of the sequence, not to a call: one decides draft and target, whatever the draft.
        draft_keys, select_keys = fold(keys_B, 0), fold(keys_B, 0)
    else:
        draft_keys, select_keys = fold(keys_B, 2 * loop.step), fold(keys_B, 2 * loop.step + 1)

    with jax.named_scope("draft"):
        tokens_BxN, p, target_cache, draft_cache = _draft(
            loop, method, target, draft, draft_keys, draft_policy
        )

    def scored(tree: Tree, logits: Float[Array, "batch nodes vocab"]) -> ScoredTree:
        tokens, nodes = tokens_BxN[:, : tree.size + 1], np.arange(tree.size + 1)
        made = processing.at_nodes(
            policy, tree, nodes, logits, jnp.maximum(tokens, 0), loop.tokens, loop.lengths
        )
        return ScoredTree(
            tree=tree, policy=policy, length=loop.lengths, tokens=tokens, p=p, logits=made
        )

    def score_and_select(tree: Tree, cache: Cache) -> _Selected:
        with jax.named_scope("score"):
            show = None if loop.features is None else features.wanted(draft)
            inputs = jnp.maximum(
                tokens_BxN[:, : tree.size + 1], 0
            )  # What follows nodes without a draft is unused.
            logits, shown, cache = scoring.score(target, tree, inputs, loop.lengths, cache, show)
        with jax.named_scope("select"):
            chosen = for_each_sequence(
                method.verifier, loop.done, select_keys, scored(tree, logits)
            )
        return _Selected(logits, shown, cache, chosen)

    if method.drafter is not None and cpu.on_cpu():  # The host of an accelerator would wait.
        drafted = jnp.any((tokens_BxN[:, 1:] >= 0) & ~loop.done[:, None])
        logits, shown, target_cache, chosen = _where_drafted(
            drafted, score_and_select, tree, target_cache
        )
    else:
        logits, shown, target_cache, chosen = score_and_select(tree, target_cache)
    with jax.named_scope("commit"):
        after = _commit(
            loop, tree, chosen, target_cache, draft, draft_cache, limits_B, policy, stop
        )
        if loop.features is not None and shown is not None:
            added = after.lengths - loop.lengths
            after = after._replace(
                features=features.after_call(loop.features, shown, chosen.path, added)
            )
        if loop.logprobs is not None:
            new = logprobs.of_call(scored(tree, logits), logits, chosen)
            after = after._replace(logprobs=logprobs.written(loop.logprobs, new, loop.lengths))
    spare_keys = fold(fold(keys_B, 2 * loop.step + 1), np.uint32(2**32 - 1))
    return after, Call(key=spare_keys, scored=scored(tree, logits), chosen=chosen)


def _where_drafted(
    drafted: BoolScalar,
    score_and_select: Callable[[Tree, Cache], _Selected],
    tree: Tree,
    cache: Cache,
) -> _Selected:
    """Returns what `score_and_select` does on `tree`; where nothing is drafted, what it does on the root alone, with zeros
    for the other nodes."""

    def on_tree(cache: Cache) -> _Selected:
        return score_and_select(tree, cache)

    def on_root(cache: Cache) -> _Selected:
        def padded(narrow: Array, wide: Array) -> Array:
            return jnp.pad(
                narrow,
                [(0, long - short) for short, long in zip(narrow.shape, wide.shape, strict=True)],
            )

        selected: _Selected = jax.tree.map(padded, score_and_select(trees.none(), cache), start)
        return selected

    def if_wanted(
        wanted: BoolScalar, branch: Callable[[Cache], _Selected], before: _Selected
    ) -> _Selected:
        """Returns what `branch` does to the cache where it is wanted: a loop of at most one turn, which updates the cache
        in place. XLA would copy it for each branch of a conditional."""

        def step(state: tuple[BoolScalar, _Selected]) -> tuple[BoolScalar, _Selected]:
            return jnp.zeros((), bool), branch(state[1].cache)

        end: tuple[BoolScalar, _Selected] = jax.lax.while_loop(
            lambda state: state[0], step, (wanted, before)
        )
        return end[1]

    start = zeros_like_output(on_tree, cache)._replace(cache=cache)
    return if_wanted(~drafted, on_root, if_wanted(drafted, on_tree, start))


def _draft(
    loop: Loop,
    method: Method,
    target: Model,
    draft: Model | None,
    keys_B: Key[Array, " batch"],
    policy: Policy,
) -> tuple[Int[Array, "batch nodes"], Float[Array, "batch inner vocab"], Cache, Cache | None]:
    """Returns the tokens of the tree, the draft distributions, and the caches of target and draft."""
    if method.drafter is not None or not method.tree.size:
        tokens_BxN = jnp.take_along_axis(loop.tokens, loop.lengths[:, None] - 1, axis=1)
        if method.drafter is not None and method.tree.size:
            found = jax.vmap(functools.partial(method.drafter, method.tree))(
                loop.tokens, loop.lengths
            )
            tokens_BxN = jnp.concatenate([tokens_BxN, found], axis=1)
        return (
            tokens_BxN,
            jnp.zeros((len(tokens_BxN), 0, target.vocab_size)),
            loop.target_cache,
            loop.draft_cache,
        )
    cache = loop.draft_cache
    if (
        method.exit_layer
    ):  # The draft's rows are the target's: it temporarily uses the target's cache.
        cache = dataclasses.replace(
            loop.target_cache, lengths=drafting.committed_length(loop.lengths)
        )
    assert draft is not None and cache is not None
    rule = drafting.RULES[method.verifier.rule]
    committed = loop.tokens, loop.lengths, cache, loop.features
    drafts = drafting.draft(keys_B, draft, rule, method.tree, policy, *committed)
    if method.exit_layer:
        return (
            drafts.tokens,
            drafts.p,
            dataclasses.replace(drafts.cache, lengths=loop.target_cache.lengths),
            None,
        )
    return drafts.tokens, drafts.p, loop.target_cache, drafts.cache


def _commit(
    loop: Loop,
    tree: Tree,
    chosen: Selection,
    target_cache: Cache,
    draft: Model | None,
    draft_cache: Cache | None,
    limits_B: Int[Array, " batch"],
    policy: Policy,
    stop: Stop | None,
) -> Loop:
    """Appends the chosen tokens to the sequences, and the accepted paths to the caches."""
    stop_states = (
        None
        if stop is None or loop.stop_states is None
        else stop.follow(loop.stop_states, chosen.tokens)
    )
    emitted, ended = _cut(chosen, policy, limits_B - loop.lengths, stop_states)
    if stop_states is not None:
        stop_states = jnp.take_along_axis(stop_states, emitted[:, None] - 1, axis=1)[:, 0]
    emitted = jnp.where(loop.done, 0, emitted)
    lengths = loop.lengths + emitted
    if draft is not None and draft_cache is not None:
        draft_cache = drafting.commit(draft, draft_cache, tree, chosen.path, loop.lengths, lengths)
    return Loop(
        step=loop.step + 1,
        tokens=jax.vmap(
            lambda tokens, new, at: jax.lax.dynamic_update_slice_in_dim(tokens, new, at, 0)
        )(loop.tokens, chosen.tokens, loop.lengths),
        lengths=lengths,
        done=loop.done | ended | (lengths >= limits_B),
        target_cache=scoring.commit(target_cache, tree, chosen.path, lengths),
        draft_cache=draft_cache,
        features=loop.features,
        logprobs=loop.logprobs,
        stop_states=stop_states,
        calls=loop.calls + ~loop.done,
        histogram=loop.histogram.at[jnp.arange(len(lengths)), emitted].add(
            (~loop.done).astype(jnp.int32)
        ),
        observed=loop.observed,
    )


def _cut(
    chosen: Selection,
    policy: Policy,
    room_B: Int[Array, " batch"],
    stop_states_BxS: Int[Array, "batch steps"] | None,
) -> tuple[Int[Array, " batch"], Bool[Array, " batch"]]:
    """Returns how many of the chosen tokens are emitted, up to EOS, a stop sequence and the limit, and whether one of the
    first two is among them."""
    emitted = jnp.minimum(chosen.emitted, room_B)
    is_end = ends(chosen.tokens, policy)
    if stop_states_BxS is not None:
        is_end |= stop_states_BxS == MATCHED
    is_end &= jnp.arange(chosen.tokens.shape[1]) < emitted[:, None]
    ended = jnp.any(is_end, axis=1)
    return jnp.where(ended, jnp.argmax(is_end, axis=1) + 1, emitted).astype(
        jnp.int32
    ), ended  # int64 with x64.
