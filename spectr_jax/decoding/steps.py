"""Decoding call by call: `stream` yields the tokens of each call of the target."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PRNGKeyArray

from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.loop import Loop, Observe, call, observe_call
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy
from spectr_jax.decoding.request import (
    LONG,
    AnyModel,
    Request,
    begun,
    check_key,
    checked,
    over_mesh,
    whole_numbers,
)
from spectr_jax.decoding.stopping import StopSpec


class Step(NamedTuple):
    """The tokens that one call of the target adds to a sequence.

    Attributes:
      tokens: the new tokens.
      observed: the output of `observe`.
      logprobs: of the new tokens, see `Logprobs`; None unless requested.
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
    mesh: Mesh | None = None,
    prompt_piece: int | None = None,
) -> Iterator[Step]:
    """Continues one prompt; yields the tokens of each call of the target as soon as it is done.

        prompt, policy = tokenizer.prompt("The committee"), Policy(eos=tokenizer.eos)
        for step in stream(key, method, target, draft, prompt, 64, policy):
            print(tokenizer.decode(step.tokens))

    The tokens are those of `generate` for the same key and prompt. Prompts of up to `LONG` tokens
    share a program. Arguments that are not listed are as in `generate`.

    Args:
      key: [] typed key; consumed.
      prompt: [T] tokens.
      observe: a function of one `Call`; each step has its output. Static.
      logprobs: whether each step has the log-probabilities of its tokens. Static.
      mesh: with a single group of devices: `make_mesh(model=N, devices=jax.devices()[:N])`.

    Raises:
      UserError: as in `generate`; raised by the call itself, not by the first step.
    """
    check_key(key, None)
    tokens = whole_numbers("prompt", prompt)
    options: dict[str, Any] = {"policy": policy, "draft_policy": draft_policy, "observe": observe}
    options |= {"logprobs": logprobs, "stop": stop, "bucket": LONG}
    options |= {"mesh": mesh, "prompt_piece": prompt_piece}
    rows = tokens[None], [tokens.size], max_new_tokens
    return _steps(checked(key, method, target, draft, *rows, **options))


def _steps(request: Request) -> Iterator[Step]:
    """Yields the tokens of each call of the target."""
    loop, length, done = _begin(request), int(request.prompts.lengths[0]), False
    while not done:
        loop, new, observed, scores = _advance(loop, request)
        new, scores, after, done = jax.device_get(
            (new, scores, loop.sequences.lengths[0], loop.done[0])
        )
        added = slice(after - length)
        logprobs = scores and Logprobs(scores.policy[added], scores.model[added])
        yield Step(new[added].tolist(), observed, logprobs)
        length = after


@jax.jit
def _begin(request: Request) -> Loop:
    """Returns the state before the first call."""
    return over_mesh(begun, dataclasses.replace(request, observe=None))  # Steps observe alone.


@functools.partial(jax.jit, donate_argnames="loop")
def _advance(
    loop: Loop, request: Request
) -> tuple[Loop, Int[Array, " steps"], Any, Logprobs | None]:
    """Calls the target once; returns the state, the new tokens, `observed` and their logprobs."""

    def advance(request: Request, loop: Loop) -> tuple[Loop, Any]:
        after, called = call(loop, request.setup())
        return after, observe_call(request.observe, called)

    (after, observed), start = over_mesh(advance, request, loop), loop.sequences.lengths[0]

    def new(rows: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(rows[0], start, request.method.tree.height + 1)

    observed = jax.tree.map(lambda leaf: leaf[0], observed)
    return after, new(after.sequences.tokens), observed, jax.tree.map(new, after.logprobs)
