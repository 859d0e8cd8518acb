"""Whole generations in one jitted call: draft, score, select, commit, until every sequence is done.

`generate` checks its input and runs on any devices; `decode` is the pure function below it, for a `jax.jit` of your own.
The module itself can be called as `generate` is: `spectr_jax.decoding.generate` is both.

Shape suffixes: B sequences, T tokens of a sequence.
"""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.typing import ArrayLike

from spectr_jax import sharding
from spectr_jax.decoding import checks, drafting, scoring, selection
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, check_policy
from spectr_jax.decoding.tree import Tree
from spectr_jax.errors import UserError
from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache
from spectr_jax.models.early_exit import EarlyExit
from spectr_jax.models.frozen import Frozen, Loaded, freeze

BUCKET = 16
"""Prompts are padded to a multiple of so many tokens."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """Generated sequences.

    Attributes:
      tokens: [B, T] int32, prompt and continuation; 0 after the end.
      lengths: [B] int32, tokens of each sequence, prompt and EOS included.
      target_calls: [B] int32, serial calls of the target for the continuation; the call on the prompt is not counted.
      emitted_per_call: [B, height + 2] int32, how many calls emitted 0, 1, 2, ... tokens (what EOS or the limit cut off is
        not counted).
      observed: sums over calls of what `observe` returned, [B, ...] each.
    """

    tokens: jax.Array
    lengths: jax.Array
    target_calls: jax.Array
    emitted_per_call: jax.Array
    observed: Any = None


class Call(NamedTuple):
    """What `observe` is given of one call, for one sequence.

    Attributes:
      tree: the draft tree.
      policy: turns the target's logits into distributions.
      key: for random numbers in `observe`; not used elsewhere.
      length: [] int32, tokens of the sequence before the call.
      tokens: [N + 1] by node, the last committed one first.
      p: [I, V] draft distributions at the inner nodes.
      logits: [N + 1, V] of the target at each node.
      chosen: the tokens, the path and the numbers of drafts.
    """

    tree: Tree
    policy: Policy
    key: jax.Array
    length: jax.Array
    tokens: jax.Array
    p: jax.Array
    logits: jax.Array
    chosen: selection.Selection


class _Loop(NamedTuple):
    step: jax.Array
    text: jax.Array
    lengths: jax.Array
    done: jax.Array
    target_cache: Cache
    draft_cache: Any
    calls: jax.Array
    histogram: jax.Array
    observed: Any


def generate(
    key: jax.Array,
    method: Method,
    target: Model | Frozen | Loaded,
    draft: Model | Frozen | Loaded | None,
    prompts: ArrayLike,
    prompt_lengths: ArrayLike,
    max_new_tokens: int,
    policy: Policy | None = None,
    observe: Callable[[Call], Any] | None = None,
    mesh: Mesh | None = None,
    draft_policy: Policy | None = None,
) -> Generation:
    """Continues prompts with sequences of the target's distribution.

    A sequence depends on its own key and prompt alone, never on the others in the batch. The second call of the same
    shapes compiles nothing.

    Args:
      key: [] typed key, or [B] typed keys, one per sequence; consumed. With a single key, sequence `i` uses
        `fold_in(key, i)`.
      method: from `get_method`.
      target: what `load` returns, an `nnx.Module` that follows `Model`, or `freeze` of one of these, which saves time where
        it is decoded with often.
      draft: likewise, with the same vocabulary; None for a method that drafts nothing.
      prompts: [B, T] int32, BOS first, padded at the end; here up to a multiple of `BUCKET`. `tokenizer.prompts` makes them
        of strings.
      prompt_lengths: [B] int32, at least 1.
      max_new_tokens: static limit of the continuation.
      policy: temperature 1 by default.
      observe: a function of one `Call`, for one sequence, whose returned arrays are summed over the calls. Static: give the
        same function object each time.
      mesh: from `sharding.make_mesh`; spreads the sequences over its devices, which then decode independently, with a
        copy of the
        models each (`sharding.replicate` them once where there are many calls); B is a multiple of their number. The texts
        are the same without it. Several processes give the same arguments.
      draft_policy: how the draft model's logits become the distributions that drafts are drawn from; `policy` by default.
        Any is exact. Its EOS is not used.

    Raises:
      UserError: a prompt that does not fit, another vocabulary, a bad key, policy or mesh, a missing draft.
    """
    models, texts = (target, draft), (prompts, prompt_lengths)
    return _generate(*_prepared(key, method, *models, *texts, max_new_tokens, policy, observe, mesh, draft_policy))


def lower(
    key,
    method,
    target,
    draft,
    prompts,
    prompt_lengths,
    max_new_tokens,
    policy=None,
    observe=None,
    mesh=None,
    draft_policy=None,
):
    """The program of the same call of `generate`, lowered but not run: a `jax.stages.Lowered`."""
    models, texts = (target, draft), (prompts, prompt_lengths)
    return _generate.lower(*_prepared(key, method, *models, *texts, max_new_tokens, policy, observe, mesh, draft_policy))


def _prepared(
    key, method, target, draft, prompts, prompt_lengths, max_new_tokens, policy, observe, mesh, draft_policy
) -> tuple:
    """The arguments of `_generate`, checked."""
    policy = policy or Policy()
    policies = policy, draft_policy or policy
    checks.check_method(method)
    tokens, lengths = checks.checked_prompts(prompts, prompt_lengths)
    drafts = draft is not None and method.tree.size and not method.exit_layer
    models = freeze(target), freeze(draft) if drafts else None
    checks.check_request(method, *models, tokens, lengths, max_new_tokens)
    checks.check_key(key, len(tokens))
    for each in policies:
        check_policy(each)
    policies = tuple(
        dataclasses.replace(
            each, temperature=jnp.asarray(each.temperature, jnp.float32), eos=jnp.asarray(each.eos, jnp.int32)
        )
        for each in policies
    )
    # One program serves prompts of many lengths.
    padded = np.pad(tokens, ((0, 0), (0, -tokens.shape[1] % BUCKET)))
    if mesh is not None:
        if mesh.axis_names != sharding.AXES or set(mesh.axis_types) != {AxisType.Auto}:
            raise UserError(f"mesh has axes {mesh.axis_names} of {mesh.axis_types}; give one of `sharding.make_mesh`")
        if len(tokens) % mesh.size:
            raise UserError(f"{len(tokens)} prompts do not divide over {mesh.size} devices; give a multiple")
        models = sharding.replicate(mesh, models)
    return method, max_new_tokens, observe, mesh, *models, key, padded, lengths, policies


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _generate(
    method: Method, max_new_tokens: int, observe, mesh: Mesh | None, target, draft, key, prompts, lengths, policies
):
    """`decode` of all texts, or on each device of its share of them."""

    def run(keys_B, target, draft, prompts_BxT, lengths_B, policies):
        policy, own = policies
        return decode(keys_B, method, target, draft, prompts_BxT, lengths_B, max_new_tokens, policy, observe, own)

    if mesh is not None:
        rows, copy = sharding.ROWS, PartitionSpec()
        specs = (rows, copy, copy, rows, rows, copy)
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    return run(_text_keys(key, len(prompts)), target, draft, prompts, lengths, policies)


def decode(
    key: jax.Array,
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    max_new_tokens: int,
    policy: Policy | None = None,
    observe: Callable[[Call], Any] | None = None,
    draft_policy: Policy | None = None,
) -> Generation:
    """What `generate` computes, as a pure function, to stand inside a `jax.jit` of your own.

        @jax.jit
        def reward(key, target, draft, prompts, lengths):  # target, draft = freeze(...), freeze(...)
            out = decode(key, method, target, draft, prompts, lengths, 32, Policy(eos=2))
            return jnp.mean(out.lengths - lengths)

    Nothing is checked here, no prompt is padded and nothing is moved to other devices: what `generate` refuses gives
    nonsense. Each shape of prompts is a program of its own.

    Args:
      key: [] typed key, or [B] typed keys, one per sequence; consumed. With a single key, sequence `i` uses
        `fold_in(key, i)`.
      method: static.
      target: from `freeze`. Let it be an argument of the jitted function: what a function closes over is compiled into it.
      draft: likewise; None for a method that drafts nothing with it.
      prompts: [B, T] int32, padded at the end.
      prompt_lengths: [B] int32, from 1 to T.
      max_new_tokens: static; the contexts of the models are at least T + max_new_tokens.
      policy: its temperature may be traced.
      observe: static.
      draft_policy: as in `generate`; likewise.

    Returns:
      Texts with tokens [B, T + max_new_tokens]: those of `generate` for the same key and prompts.
    """
    keys_B, prompts_BxT, policy = _text_keys(key, len(prompts)), prompts, policy or Policy()
    large = target.merge()
    small = EarlyExit(large, method.exit_layer) if method.exit_layer else draft.merge() if draft else None
    limits_B = prompt_lengths + max_new_tokens

    def step(loop: _Loop) -> _Loop:
        after, seen = call(loop, method, large, small, keys_B, limits_B, policy, draft_policy)
        return after._replace(observed=_add_observed(loop, observe, seen))

    start = prefill(method, large, small, prompts_BxT, prompt_lengths, max_new_tokens)
    if observe is not None:
        seen = jax.eval_shape(
            lambda: _observe_texts(observe, call(start, method, large, small, keys_B, limits_B, policy, draft_policy)[1])
        )
        start = start._replace(observed=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), seen))
    end = jax.lax.while_loop(lambda loop: ~jnp.all(loop.done), step, start)
    T = prompts_BxT.shape[1] + max_new_tokens
    tokens_BxT = jnp.where(jnp.arange(T) < end.lengths[:, None], end.text[:, :T], 0)
    return Generation(tokens_BxT, end.lengths, end.calls, end.histogram, end.observed)


def prefill(method: Method, target, draft, prompts_BxT, lengths_B, max_new_tokens: int) -> _Loop:
    """Runs both models on the prompts. Cache rows beyond the end of a shorter prompt are pending, and overwritten later."""
    B, T = prompts_BxT.shape
    tree = method.tree
    most = T + max_new_tokens
    own_cache = tree.size and not method.exit_layer

    def run(model, nodes, committed_B):
        cache = model.init_cache(B, most + nodes)
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        _, cache = model.extend(prompts_BxT, positions, jnp.broadcast_to(np.tri(T, dtype=bool), (B, T, T)), cache)
        return dataclasses.replace(cache, lengths=committed_B)

    return _Loop(
        step=jnp.zeros((), jnp.int32),
        text=jnp.pad(prompts_BxT, ((0, 0), (0, max_new_tokens + tree.height + 1))),
        lengths=lengths_B,
        done=jnp.zeros(B, bool),
        target_cache=run(target, tree.size + drafting.RECALLED, lengths_B - 1),
        draft_cache=run(draft, tree.size + drafting.RECALLED, drafting.committed_length(lengths_B)) if own_cache else None,
        calls=jnp.zeros(B, jnp.int32),
        histogram=jnp.zeros((B, tree.height + 2), jnp.int32),
        observed=None,
    )


def _observe_texts(observe, call: Call):
    def one(*parts):
        return observe(Call(call.tree, call.policy, *parts))

    # Sums of truth values are counts.
    return jax.tree.map(lambda x: x.astype(jnp.int32) if x.dtype == bool else x, jax.vmap(one)(*call[2:]))


def _add_observed(loop: _Loop, observe, call: Call):
    """The sums with this call's values added, for sequences that are not done."""
    if observe is None:
        return None

    def add(total, new):
        done = loop.done.reshape(-1, *[1] * (new.ndim - 1))
        return total + jnp.where(done, 0, new)

    return jax.tree.map(add, loop.observed, _observe_texts(observe, call))


def call(
    loop: _Loop, method: Method, target, draft, keys_B, limits_B, policy: Policy, draft_policy: Policy | None = None
) -> tuple[_Loop, Call]:
    """One serial call of the target, for all sequences; finished ones do not change."""
    tree = method.tree
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
    if method.plan.drafts == "race":
        # A race belongs to a place in the text, not to a call: one decides draft and target, whatever the draft.
        draft_keys, select_keys = fold(keys_B, 0), fold(keys_B, 0)
    else:
        draft_keys, select_keys = fold(keys_B, 2 * loop.step), fold(keys_B, 2 * loop.step + 1)

    with jax.named_scope("draft"):
        tokens_BxN, p, target_cache, draft_cache = _draft(loop, method, target, draft, draft_keys, draft_policy or policy)
    with jax.named_scope("score"):
        logits, target_cache = scoring.score(target, tree, tokens_BxN, loop.lengths, target_cache)
    with jax.named_scope("select"):
        chosen = selection.for_each_text(method.walk, method.plan, tree, policy)(
            loop.done, select_keys, loop.lengths, tokens_BxN, p, logits
        )
    with jax.named_scope("commit"):
        after = _commit(loop, tree, chosen, target_cache, draft_cache, limits_B, policy.eos)
    spare_keys = fold(fold(keys_B, 2 * loop.step + 1), np.uint32(2**32 - 1))
    return after, Call(tree, policy, spare_keys, loop.lengths, tokens_BxN, p, logits, chosen)


def _draft(loop: _Loop, method: Method, target, draft, keys_B, policy: Policy):
    """Tokens [B, N + 1], draft distributions [B, I, V], and the caches of target and draft."""
    if not method.tree.size:
        tokens_Bx1 = jnp.take_along_axis(loop.text, loop.lengths[:, None] - 1, axis=1)
        return tokens_Bx1, jnp.zeros((len(tokens_Bx1), 0, target.vocab_size)), loop.target_cache, loop.draft_cache
    cache = loop.draft_cache
    if method.exit_layer:  # The draft's rows are the target's: for a while it takes over the target's cache.
        cache = dataclasses.replace(loop.target_cache, lengths=drafting.committed_length(loop.lengths))
    drafts = drafting.draft(keys_B, draft, method.rule, method.tree, policy, loop.text, loop.lengths, cache)
    if method.exit_layer:
        return drafts.tokens, drafts.p, dataclasses.replace(drafts.cache, lengths=loop.target_cache.lengths), None
    return drafts.tokens, drafts.p, loop.target_cache, drafts.cache


def _commit(
    loop: _Loop, tree: Tree, chosen: selection.Selection, target_cache, draft_cache, limits_B, eos: int | jax.Array
) -> _Loop:
    """Appends the chosen tokens to the sequences, and the accepted paths to the caches."""
    emitted, ended = _cut(chosen, eos, limits_B - loop.lengths)
    emitted = jnp.where(loop.done, 0, emitted)
    lengths = loop.lengths + emitted
    if draft_cache is not None:
        draft_cache = drafting.commit(draft_cache, tree, chosen.path, loop.lengths, lengths)
    return _Loop(
        step=loop.step + 1,
        text=jax.vmap(lambda text, new, at: jax.lax.dynamic_update_slice_in_dim(text, new, at, 0))(
            loop.text, chosen.tokens, loop.lengths
        ),
        lengths=lengths,
        done=loop.done | ended | (lengths >= limits_B),
        target_cache=scoring.commit(target_cache, chosen.path, lengths),
        draft_cache=draft_cache,
        calls=loop.calls + ~loop.done,
        histogram=loop.histogram.at[jnp.arange(len(lengths)), emitted].add(jnp.where(loop.done, 0, 1)),
        observed=loop.observed,
    )


def _cut(chosen: selection.Selection, eos: int | jax.Array, room_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of the chosen tokens are emitted [B], up to EOS and the limit, and whether EOS is among them [B]."""
    emitted = jnp.minimum(chosen.emitted, room_B)
    is_eos = (chosen.tokens == eos) & (jnp.arange(chosen.tokens.shape[1]) < emitted[:, None])
    ended = jnp.any(is_eos, axis=1)
    return jnp.where(ended, jnp.argmax(is_eos, axis=1) + 1, emitted).astype(jnp.int32), ended  # int64 with x64.


def _text_keys(key: jax.Array, texts: int) -> jax.Array:
    """A key for each text [B]."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, np.arange(texts)) if key.ndim == 0 else key


class _CallableModule(types.ModuleType):
    """`from spectr_jax.decoding import generate` gives this module, which was the function for its first users."""

    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _CallableModule
