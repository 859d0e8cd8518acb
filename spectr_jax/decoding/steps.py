"""Decoding call by call: `stream` yields the tokens of each call of the target."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PRNGKeyArray

from spectr_jax.decoding import checks
from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.loop import Loop, call, merged, observe_call, prefill
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy
from spectr_jax.decoding.request import (
    LONG,
    AnyModel,
    Observe,
    Request,
    checked,
    padded,
    sequence_keys,
)
from spectr_jax.decoding.stopping import Stop, StopSpec
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils.errors import UserError


class Step(NamedTuple):
    """What one call of the target adds to a sequence.

    Attributes:
      tokens: the new ones.
      observed: what `observe` returned.
      logprobs: of the new tokens, as `Logprobs` says; None unless they were asked for.
    """

    tokens: list[int]
    observed: Any
    logprobs: Logprobs | None = None


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
    logprobs: bool = False,
    stop: StopSpec = None,
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
      logprobs: log-probabilities come with the call's tokens too. Static.
      stop: as in `generate`.

    Raises:
      UserError: what `generate` refuses; at once, not at the first token.
    """
    if getattr(key, "shape", ()) != ():
        raise UserError(
            f"key is {key.dtype}{list(key.shape)}; give one, such as jax.random.key(seed)"
        )
    tokens = checks.whole_numbers("prompt", prompt)
    rows = tokens[None], np.array([tokens.size])
    request = Request(
        key,
        method,
        target,
        draft,
        *rows,
        max_new_tokens,
        policy,
        observe,
        None,
        draft_policy,
        logprobs,
        stop,
    )
    return _steps(padded(checked(request), LONG))


def _steps(request: Request) -> Iterator[Step]:
    """Yields the tokens of each call of the target."""
    (
        key,
        method,
        target,
        draft,
        prompts,
        lengths,
        max_new_tokens,
        policy,
        observe,
        _,
        draft_policy,
        logprobs,
        stop,
    ) = request
    loop = _begin(
        method, max_new_tokens, logprobs, stop is not None, target, draft, prompts, lengths
    )
    length, done, limits = int(lengths[0]), False, lengths + max_new_tokens
    while not done:
        loop, new, observed, scores = _advance(
            loop, key, method, target, draft, limits, policy, observe, draft_policy, stop
        )
        new, scores, after, done = jax.device_get((new, scores, loop.lengths[0], loop.done[0]))
        added = slice(after - length)
        yield Step(
            new[added].tolist(),
            observed,
            scores and Logprobs(scores.policy[added], scores.model[added]),
        )
        length = after


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _begin(
    method: Method,
    max_new_tokens: int,
    logprobs: bool,
    stops: bool,
    target: Frozen,
    draft: Frozen | None,
    prompts: Int[Array, "batch time"],
    lengths: Int[Array, " batch"],
) -> Loop:
    """Returns the state before the first call."""
    return prefill(
        method, *merged(method, target, draft), prompts, lengths, max_new_tokens, logprobs, stops
    )


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
    stop: Stop | None,
) -> tuple[Loop, Int[Array, " steps"], Any, Logprobs | None]:
    """Calls the target once; returns the state, the tokens from where it was, what is observed, and log-probabilities."""
    models = merged(method, target, draft)
    after, called = call(
        loop, method, *models, sequence_keys(key, 1), limits, policy, draft_policy, stop
    )

    def new(rows: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(rows[0], loop.lengths[0], method.tree.height + 1)

    observed = (
        None
        if observe is None
        else jax.tree.map(lambda leaf: leaf[0], observe_call(observe, called))
    )
    return after, new(after.tokens), observed, jax.tree.map(new, after.logprobs)
