"""Whole generations in one jitted call: draft, score, select, commit, until every sequence is done.

`generate` checks its input and runs on any devices; `decode` is the pure function below it, for a `jax.jit` of your own.
The module itself can be called as `generate` is: `spectr_jax.decoding.generate` is both.

Shape suffixes: B sequences, T tokens of a sequence.
"""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, PRNGKeyArray

from spectr_jax import sharding
from spectr_jax.decoding import checks
from spectr_jax.decoding.loop import Call, Loop, add_observed, call, observe_call, prefill
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, check_policy
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.errors import UserError
from spectr_jax.models.base import Model
from spectr_jax.models.early_exit import EarlyExit
from spectr_jax.models.frozen import Frozen, Loaded, freeze

AnyModel: TypeAlias = Model | Frozen | Loaded
Observe: TypeAlias = Callable[[Call], Any]

BUCKET = 16
"""Prompts are padded to a multiple of so many tokens."""
LONG = 256
"""Those that are longer than this, and those of `stream`, to a multiple of it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """Generated sequences.

    Attributes:
      tokens: [B, T] int32, prompt and continuation; 0 after the end. A last token of -1 says that the target had
        no distribution there, as of logits that are NaN.
      lengths: [B] int32, tokens of each sequence, prompt and EOS included.
      target_calls: [B] int32, serial calls of the target for the continuation; the call on the prompt is not counted.
      emitted_per_call: [B, height + 2] int32, how many calls emitted 0, 1, 2, ... tokens (what EOS or the limit cut off is
        not counted).
      observed: sums over calls of what `observe` returned, [B, ...] each.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " batch"]
    target_calls: Int[Array, " batch"]
    emitted_per_call: Int[Array, "batch counts"]
    observed: Any = None


def generate(
    key: PRNGKeyArray | Key[Array, " batch"],
    method: Method,
    target: AnyModel,
    draft: AnyModel | None,
    prompts: ArrayLike | Sequence[Sequence[int]],
    prompt_lengths: ArrayLike | Sequence[int],
    max_new_tokens: int,
    policy: Policy | None = None,
    observe: Observe | None = None,
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
      draft: likewise, with the target's vocabulary; `spectr_jax.pairs.fitted` fits one to it whose added or padded tokens
        differ. None for a method that needs no draft model.
      prompts: [B, T] int32, BOS first, padded at the end, which is done here up to a multiple of `BUCKET`.
        `tokenizer.prompts` makes them of strings.
      prompt_lengths: [B] int32, at least 1.
      max_new_tokens: static limit of the continuation.
      policy: temperature 1 by default.
      observe: a function of one `Call`, for one sequence, whose returned arrays are summed over the calls. Static: give the
        same function object each time.
      mesh: from `sharding.make_mesh`; spreads the sequences over its devices, which then decode independently, with a copy
        of the models each (`sharding.replicate` them once where there are many calls); B is a multiple of their number. The
        sequences are the same without it. Several processes give the same arguments.
      draft_policy: how the draft model's logits become the distributions that drafts are drawn from; `policy` by default.
        Any is exact. Its EOS is not used.

    Raises:
      UserError: a prompt that does not fit, another vocabulary, a bad key, policy or mesh, a missing draft.
    """
    request = _Request(
        key, method, target, draft, prompts, prompt_lengths, max_new_tokens, policy, observe, mesh, draft_policy
    )
    generation: Generation = _generate(*_padded(_checked(request), BUCKET))
    return generation


class _Request(NamedTuple):
    """The arguments of `generate`; once they are checked also those of `_generate`."""

    key: PRNGKeyArray | Key[Array, " batch"]
    method: Method
    target: Any
    draft: Any
    prompts: Any
    prompt_lengths: Any
    max_new_tokens: int
    policy: Policy | None = None
    observe: Observe | None = None
    mesh: Mesh | None = None
    draft_policy: Policy | None = None


def _checked(request: _Request) -> _Request:
    """Returns the request with its models frozen, and both policies given; raises `UserError` as `generate` does."""
    method, mesh, policy = request.method, request.mesh, request.policy or Policy()
    draft_policy = request.draft_policy or policy
    checks.check_method(method)
    tokens, lengths = checks.checked_prompts(request.prompts, request.prompt_lengths)
    drafts = method.needs_draft and request.draft is not None
    models = freeze(request.target), freeze(request.draft) if drafts else None
    checks.check_request(method, *models, tokens, lengths, request.max_new_tokens)
    checks.check_key(request.key, len(tokens))
    check_policy(policy)
    check_policy(draft_policy, "draft_")
    if mesh is not None:
        _check_mesh(mesh, len(tokens))
        models = sharding.replicate(mesh, models)
    return request._replace(
        target=models[0],
        draft=models[1],
        prompts=tokens,
        prompt_lengths=lengths,
        policy=_as_arrays(policy),
        draft_policy=_as_arrays(draft_policy),
    )


def lower(*arguments: Any, **options: Any) -> jax.stages.Lowered:
    """Returns the program of the call `generate(*arguments, **options)`, lowered but not run."""
    return _generate.lower(*_padded(_checked(_Request(*arguments, **options)), BUCKET))


def _check_mesh(mesh: Mesh, sequences: int) -> None:
    """Raises `UserError` for a mesh with other axes than ours, or over which the sequences do not divide."""
    if mesh.axis_names != sharding.AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise UserError(f"mesh has axes {mesh.axis_names} of {mesh.axis_types}; give one of `sharding.make_mesh`")
    if sequences % mesh.size:
        raise UserError(f"{sequences} prompts do not divide over {mesh.size} devices; give a multiple")


def _as_arrays(policy: Policy) -> Policy:
    """Returns the policy with what is traced as arrays, so that one program serves all its values."""
    temperature, eos = jnp.asarray(policy.temperature, jnp.float32), jnp.asarray(policy.eos, jnp.int32)
    return dataclasses.replace(policy, temperature=temperature, eos=eos)


def _padded(request: _Request, bucket: int) -> _Request:
    """Returns the request with its prompts padded to a `padded_length`."""
    T = request.prompts.shape[1]
    return request._replace(prompts=np.pad(request.prompts, ((0, 0), (0, padded_length(T, bucket) - T))))


def padded_length(tokens: int, bucket: int = BUCKET) -> int:
    """Returns the length that prompts of `tokens` tokens are padded to, so that one program serves many lengths."""
    bucket = bucket if tokens <= LONG else LONG
    return -(-tokens // bucket) * bucket


@functools.partial(jax.jit, static_argnames=("method", "max_new_tokens", "observe", "mesh"))
def _generate(
    key: PRNGKeyArray | Key[Array, " batch"],
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    prompts: Int[Array, "batch time"],
    prompt_lengths: Int[Array, " batch"],
    max_new_tokens: int,
    policy: Policy,
    observe: Observe | None,
    mesh: Mesh | None,
    draft_policy: Policy,
) -> Generation:
    """Returns `decode` of all sequences, or on each device of its share of them."""

    def run(keys_B: Key[Array, " share"], prompts: Array, lengths: Array, same: tuple[Any, ...]) -> Generation:
        target, draft, policy, draft_policy = same
        return decode(keys_B, method, target, draft, prompts, lengths, max_new_tokens, policy, observe, draft_policy)

    if mesh is not None:
        rows = sharding.ROWS
        specs = (rows, rows, rows, PartitionSpec())
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    same = target, draft, policy, draft_policy
    return run(_sequence_keys(key, len(prompts)), prompts, prompt_lengths, same)


def decode(
    key: PRNGKeyArray | Key[Array, " batch"],
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    prompts: Int[Array, "batch time"],
    prompt_lengths: Int[Array, " batch"],
    max_new_tokens: int,
    policy: Policy | None = None,
    observe: Observe | None = None,
    draft_policy: Policy | None = None,
) -> Generation:
    """Returns what `generate` does, as a pure function, to stand inside a `jax.jit` of your own.

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
      draft: likewise; None for a method that needs none.
      prompts: [B, T] int32, padded at the end.
      prompt_lengths: [B] int32, from 1 to T.
      max_new_tokens: static; the contexts of the models are at least T + max_new_tokens.
      policy: its temperature may be traced.
      observe: static.
      draft_policy: as in `generate`; likewise.

    Returns:
      Texts with tokens [B, T + max_new_tokens]: those of `generate` for the same key and prompts.
    """
    keys_B, prompts_BxT, policy = _sequence_keys(key, len(prompts)), prompts, policy or Policy()
    large, small = _merged(method, target, draft)
    limits_B = prompt_lengths + max_new_tokens

    def one_call(loop: Loop) -> tuple[Loop, Call]:
        return call(loop, method, large, small, keys_B, limits_B, policy, draft_policy)

    def step(loop: Loop) -> Loop:
        after, called = one_call(loop)
        return after._replace(observed=add_observed(loop, observe, called))

    start = prefill(method, large, small, prompts_BxT, prompt_lengths, max_new_tokens)
    if observe is not None:
        none = zeros_like_output(lambda: observe_call(observe, one_call(start)[1]))
        start = start._replace(observed=none)
    end = jax.lax.while_loop(lambda loop: ~jnp.all(loop.done), step, start)
    T = prompts_BxT.shape[1] + max_new_tokens
    tokens_BxT = jnp.where(jnp.arange(T) < end.lengths[:, None], end.tokens[:, :T], 0)
    return Generation(tokens_BxT, end.lengths, end.calls, end.histogram, end.observed)


def _merged(method: Method, target: Frozen, draft: Frozen | None) -> tuple[Any, Any]:
    """Returns the models of target and draft."""
    large = target.merge()
    if method.exit_layer:
        return large, EarlyExit(large, method.exit_layer)
    return large, draft.merge() if draft else None


class Step(NamedTuple):
    """What one call of the target adds to a sequence.

    Attributes:
      tokens: the new ones.
      observed: what `observe` returned.
    """

    tokens: list[int]
    observed: Any


def stream(
    key: PRNGKeyArray,
    method: Method,
    target: AnyModel,
    draft: AnyModel | None,
    prompt: ArrayLike | Sequence[int],
    max_new_tokens: int,
    policy: Policy | None = None,
    observe: Observe | None = None,
    draft_policy: Policy | None = None,
) -> Iterator[Step]:
    """Continues one prompt and yields the tokens of each call of the target as they are there.

        for step in stream(key, method, target, draft, tokenizer.prompt("The committee"), 64, Policy(eos=tokenizer.eos)):
            print(tokenizer.decode(step.tokens))

    Together they are those of `generate` for the prompt and the key. Prompts of up to `LONG` tokens share a program.

    Args:
      key: [] typed key; consumed.
      method: as in `generate`, like the other arguments that are not here.
      prompt: [T] tokens.
      observe: a function of one `Call`; what it returns comes with the call's tokens. Static.

    Raises:
      UserError: what `generate` refuses; at once, not at the first token.
    """
    if getattr(key, "shape", ()) != ():
        raise UserError(f"key is {key.dtype}{list(key.shape)}; give one, such as jax.random.key(seed)")
    prompts = np.asarray(prompt)[None], np.array([np.size(prompt)])
    request = _Request(key, method, target, draft, *prompts, max_new_tokens, policy, observe, None, draft_policy)
    return _steps(_padded(_checked(request), LONG))


def _steps(request: _Request) -> Iterator[Step]:
    """Yields the tokens of each call of the target."""
    key, method, target, draft, prompts, lengths, max_new_tokens, policy, observe, _, draft_policy = request
    loop = _begin(method, max_new_tokens, target, draft, prompts, lengths)
    length, done, limits = int(lengths[0]), False, lengths + max_new_tokens
    while not done:
        loop, new, observed = _advance(loop, key, method, target, draft, limits, policy, observe, draft_policy)
        new, after, done = jax.device_get((new, loop.lengths[0], loop.done[0]))
        yield Step(new[: after - length].tolist(), observed)
        length = after


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(
    method: Method,
    max_new_tokens: int,
    target: Frozen,
    draft: Frozen | None,
    prompts: Int[Array, "batch time"],
    lengths: Int[Array, " batch"],
) -> Loop:
    """Returns the state before the first call."""
    return prefill(method, *_merged(method, target, draft), prompts, lengths, max_new_tokens)


@functools.partial(jax.jit, static_argnames=("method", "observe"), donate_argnames="loop")
def _advance(
    loop: Loop,
    key: PRNGKeyArray,
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    limits: Int[Array, " batch"],
    policy: Policy,
    observe: Observe | None,
    draft_policy: Policy,
) -> tuple[Loop, Int[Array, " steps"], Any]:
    """Calls the target once; returns the state, the tokens from where it was, and what is observed."""
    models = _merged(method, target, draft)
    after, called = call(loop, method, *models, _sequence_keys(key, 1), limits, policy, draft_policy)
    new = jax.lax.dynamic_slice_in_dim(after.tokens[0], loop.lengths[0], method.tree.height + 1)
    observed = None if observe is None else jax.tree.map(lambda leaf: leaf[0], observe_call(observe, called))
    return after, new, observed


def _sequence_keys(key: PRNGKeyArray | Key[Array, " batch"], sequences: int) -> Key[Array, " batch"]:
    """Returns a key for each sequence."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, np.arange(sequences)) if key.ndim == 0 else key


class _CallableModule(types.ModuleType):
    """`from spectr_jax.decoding import generate` gives this module, which was the function for its first users."""

    __call__ = staticmethod(generate)


sys.modules[__name__].__class__ = _CallableModule
