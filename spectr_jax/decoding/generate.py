"""Whole generations in one jitted call: draft, score, select, commit, until every sequence is done.

`generate` checks its input and runs on any devices; `decode` is the pure function below it, for a `jax.jit` of your own.

Shape suffixes: B sequences, T tokens of a sequence.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Int, Key, PRNGKeyArray

from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.loop import Call, Loop, add_observed, call, merged, observe_call, prefill
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, for_rows
from spectr_jax.decoding.request import (
    BUCKET,
    AnyModel,
    Observe,
    Request,
    checked,
    padded,
    sequence_keys,
)
from spectr_jax.decoding.stopping import Stop, StopSpec
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils import sharding


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
      logprobs: of the emitted tokens, two arrays [B, T] as `Logprobs` says; None unless they were asked for.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " batch"]
    target_calls: Int[Array, " batch"]
    emitted_per_call: Int[Array, "batch counts"]
    observed: Any = None
    logprobs: Logprobs | None = None


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
    logprobs: bool = False,
    stop: StopSpec = None,
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
      draft: likewise, with the target's vocabulary; `spectr_jax.loading.pairs.fitted` fits one to it whose added or padded tokens
        differ. Past its context it drafts nothing. None for a method that needs no draft model.
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
      logprobs: return the log-probabilities of the emitted tokens too, from the calls that verified them. Static.
      stop: a text, several, or several sequences of tokens. A sequence ends with the token that completes the first of them
        in what was added to the prompt (`stopping.before` cuts the text there). Texts need a target that `load` returned.

    Raises:
      UserError: a prompt that does not fit, another vocabulary, a bad key, policy or mesh, a missing draft.
    """
    request = Request(
        key, method, target, draft, prompts, prompt_lengths, max_new_tokens, policy, observe, mesh
    )
    request = request._replace(draft_policy=draft_policy, logprobs=logprobs, stop=stop)
    generation: Generation = _generate(*padded(checked(request), BUCKET))
    return generation


def lower(*arguments: Any, **options: Any) -> jax.stages.Lowered:
    """Returns the program of the call `generate(*arguments, **options)`, lowered but not run."""
    return _generate.lower(*padded(checked(Request(*arguments, **options)), BUCKET))


@functools.partial(
    jax.jit, static_argnames=("method", "max_new_tokens", "observe", "mesh", "logprobs")
)
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
    logprobs: bool,
    stop: Stop | None,
) -> Generation:
    """Returns `decode` of all sequences, or on each device of its share of them."""

    def run(
        keys_B: Key[Array, " share"], own: tuple[Any, ...], same: tuple[Any, ...]
    ) -> Generation:
        (prompts, lengths, policy, draft_policy), (target, draft, stop) = own, same
        models = method, target, draft
        return decode(
            keys_B,
            *models,
            prompts,
            lengths,
            max_new_tokens,
            policy,
            observe,
            draft_policy,
            logprobs,
            stop,
        )

    if mesh is not None:
        rows = sharding.ROWS
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(rows, rows, PartitionSpec()), out_specs=rows, check_vma=False
        )
    own = prompts, prompt_lengths, policy, draft_policy
    return run(sequence_keys(key, len(prompts)), own, (target, draft, stop))


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
    logprobs: bool = False,
    stop: Stop | None = None,
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
      max_new_tokens: static; with the longest prompt within the target's context.
      policy: its numbers may be traced. What is left at its default costs nothing.
      observe: static.
      draft_policy: as in `generate`; likewise.
      logprobs: static.
      stop: from `stopping.prepared`; traced.

    Returns:
      Texts with tokens [B, T + max_new_tokens]: those of `generate` for the same key and prompts.
    """
    keys_B, prompts_BxT = sequence_keys(key, len(prompts)), prompts
    policy = for_rows(policy or Policy(), len(prompts))
    draft_policy = policy if draft_policy is None else for_rows(draft_policy, len(prompts))
    large, small = merged(method, target, draft)
    limits_B = prompt_lengths + max_new_tokens

    def one_call(loop: Loop) -> tuple[Loop, Call]:
        return call(loop, method, large, small, keys_B, limits_B, policy, draft_policy, stop)

    def step(loop: Loop) -> Loop:
        after, called = one_call(loop)
        return after._replace(observed=add_observed(loop, observe, called))

    start = prefill(
        method,
        large,
        small,
        prompts_BxT,
        prompt_lengths,
        max_new_tokens,
        logprobs,
        stop is not None,
    )
    if observe is not None:
        none = zeros_like_output(lambda: observe_call(observe, one_call(start)[1]))
        start = start._replace(observed=none)
    end = jax.lax.while_loop(lambda loop: ~jnp.all(loop.done), step, start)
    T = prompts_BxT.shape[1] + max_new_tokens

    def until_end(rows_BxT: Array) -> Array:
        return jnp.where(jnp.arange(T) < end.lengths[:, None], rows_BxT[:, :T], 0)

    return Generation(
        tokens=until_end(end.tokens),
        lengths=end.lengths,
        target_calls=end.calls,
        emitted_per_call=end.histogram,
        observed=end.observed,
        logprobs=jax.tree.map(until_end, end.logprobs),
    )
