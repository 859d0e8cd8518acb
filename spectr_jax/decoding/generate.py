"""Whole generations in one jitted call: draft, score, select and commit until all sequences end.

`generate` checks its arguments and runs on any devices. `decode` is the pure function it wraps, for
your own `jax.jit`.

Shape suffixes: B sequences, T tokens of a sequence.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PRNGKeyArray

from spectr_jax.decoding.drafters import Sequences
from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.loop import Loop, Observe, call_and_observe
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy
from spectr_jax.decoding.request import AnyModel, Request, begun, checked, over_mesh, request_of
from spectr_jax.decoding.stopping import Stop, StopSpec
from spectr_jax.decoding.tree import Keys, PerRow, Tokens
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generation:
    """Generated sequences.

    Attributes:
      tokens: [B, T] int32, prompt and continuation; 0 after the end. T leaves room for the longest
        sequence. A last token of -1 means that the target had no distribution there (NaN logits).
      lengths: [B] int32, the number of tokens of each sequence, prompt and EOS included.
      target_calls: [B] int32, the number of target calls, without the call on the prompt.
      emitted_per_call: [B, height + 2] int32, the number of calls that emitted 0, 1, 2, ... tokens.
        Tokens after EOS, a stop sequence or the limit do not count.
      observed: the outputs of `observe`, summed over calls, [B, ...] each.
      logprobs: two arrays [B, T], see `Logprobs`; None unless requested.
    """

    tokens: Int[Array, "batch time"]
    lengths: Int[Array, " batch"]
    target_calls: Int[Array, " batch"]
    emitted_per_call: Int[Array, "batch counts"]
    observed: Any = None
    logprobs: Logprobs | None = None


def generate(
    key: PRNGKeyArray | Keys,
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
    prompt_piece: int | None = None,
) -> Generation:
    """Continues prompts with sequences that follow the target's distribution.

    A sequence depends on its own key and prompt only, never on the rest of the batch. A second call
    of the same shapes compiles nothing.

    Args:
      key: [] typed key, or [B] typed keys, one per sequence; consumed. With a single key, sequence
        `i` uses `fold_in(key, i)`. Not of the kind "rbg", whose rows share bits under `vmap`.
      method: from `get_method`.
      target: the output of `load`, an `nnx.Module` or other pytree that follows `Model`, such as a
        `FunctionalModel`, or `freeze` of one of these, which saves time over many calls.
      draft: likewise, with the target's vocabulary; `spectr_jax.loading.pairs.fitted` fits a draft
        whose added or padded tokens differ. It drafts nothing past its context. None for a method
        that needs no draft model.
      prompts: [B, T] int32, BOS first, padded at the end. `tokenizer.prompts` makes them from
        strings.
      prompt_lengths: [B] int32, at least 1.
      max_new_tokens: the limit of the continuation, in tokens. Limits within a multiple of 16 share
        a program.
      policy: how logits become probabilities, and the EOS; temperature 1 by default.
      observe: a function of one `Call`, for one sequence; its output arrays are summed over calls.
        Static: pass the same function object each time.
      mesh: from `sharding.make_mesh`. The sequences are spread over its groups of devices, so B must
        be a multiple of their number. With `make_mesh(model=N)` each group of N devices shares one
        copy of the weights, if the target is a decoder of this package (`models.parallel`); a
        smaller draft is copied to each device. Other models are copied too, unless their arrays
        lie on the mesh already. Place models once before many calls: with `load(..., mesh=mesh)`
        or `parallel.on_mesh`. The sequences follow the same distribution without a mesh, and are
        the same up to rounding (also that of drafts: `levels.stored`). In a run of several processes
        all pass the same arguments, and get arrays of the whole mesh: `utils.hosts.fetch` returns
        them as NumPy arrays in each process.
      draft_policy: the policy of the draft model, without its EOS; `policy` by default. The outputs
        are exact with any draft policy.
      logprobs: static; whether to return the log-probabilities of the emitted tokens.
      stop: a string, several strings, or several token sequences. A sequence ends with the token
        that completes the first of them in the continuation (`stopping.before` cuts the string
        there). Strings need a target that `load` returned.
      prompt_piece: static; the models run on at most this many tokens of each prompt at once,
        rounded up to a multiple of 16. Longer pieces read the weights less often and take more
        memory. None for 64 on a CPU, and on an accelerator for 1,024, or fewer if there are many
        prompts.

    Raises:
      UserError: an argument is out of range, or does not fit the others.
    """
    options: Any = observe, mesh, draft_policy, logprobs, stop, prompt_piece
    rows = prompts, prompt_lengths, max_new_tokens, policy
    return _generate(checked(key, method, target, draft, *rows, *options))


def lower(*arguments: Any, **options: Any) -> jax.stages.Lowered:
    """Returns the lowered program of `generate(*arguments, **options)`, without running it."""
    return _generate.lower(checked(*arguments, **options))


@jax.jit
def _generate(request: Request) -> Generation:
    """Returns the output of `_decode`."""
    return over_mesh(_decode, request)


def decode(
    key: PRNGKeyArray | Keys,
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    prompts: Tokens,
    prompt_lengths: PerRow,
    max_new_tokens: int,
    policy: Policy | None = None,
    observe: Observe | None = None,
    draft_policy: Policy | None = None,
    logprobs: bool = False,
    stop: Stop | None = None,
    mesh: Mesh | None = None,
    prompt_piece: int | None = None,
) -> Generation:
    """Returns the output of `generate`, as a pure function for your own `jax.jit`.

        @jax.jit
        def reward(key, target, draft, prompts, lengths):  # The models come from `freeze`.
            out = decode(key, method, target, draft, prompts, lengths, 32, Policy(eos=2))
            return jnp.mean(out.lengths - lengths)

    It checks nothing, pads no prompts and moves nothing to other devices: arguments that `generate`
    refuses give undefined outputs. Each shape of prompts compiles its own program. Arguments that
    are not listed are as in `generate`.

    Args:
      target: from `freeze`. Pass it to the jitted function: closed-over arrays become constants.
      draft: likewise.
      prompts: [B, T] int32, padded at the end.
      prompt_lengths: [B] int32, from 1 to T.
      max_new_tokens: static; the longest prompt and this must fit the target's context.
      policy: its numbers may be traced, like those of `draft_policy`.
      stop: from `stopping.prepared`; traced.
      mesh: static; the models lie on it already (`parallel.on_mesh`).

    Returns:
      The output of `generate` for the same key and prompts; tokens are [B, T + max_new_tokens].
    """
    sequences = Sequences(tokens=prompts, lengths=prompt_lengths)
    rows = sequences, max_new_tokens, max_new_tokens
    options: Any = {"observe": observe, "mesh": mesh, "logprobs": logprobs, "stop": stop}
    options |= {"prompt_piece": prompt_piece}
    request = request_of(key, method, target, draft, *rows, policy, draft_policy, **options)
    return over_mesh(_decode, request)


def _decode(request: Request) -> Generation:
    """Returns the output of `decode`."""
    setup = request.setup()

    def step(loop: Loop) -> Loop:
        return call_and_observe(loop, setup, request.observe)

    def any_left(loop: Loop) -> Array:
        return sharding.over_groups(~jnp.all(loop.done))

    end = jax.lax.while_loop(any_left, step, begun(request))
    T = request.prompts.tokens.shape[1] + request.room

    def until_end(rows_BxT: Array) -> Array:
        return jnp.where(jnp.arange(T) < end.sequences.lengths[:, None], rows_BxT[:, :T], 0)

    return Generation(
        tokens=until_end(end.sequences.tokens),
        lengths=end.sequences.lengths,
        target_calls=end.calls,
        emitted_per_call=end.emitted_per_call,
        observed=end.observed,
        logprobs=jax.tree.map(until_end, end.logprobs),
    )
