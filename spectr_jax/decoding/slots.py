"""A list of prompts through a fixed number of slots: `generate_all`.

A slot is a row of the batch. A sequence that ends leaves its slot, and the next prompt takes it, so
that no slot waits for the longest sequence of a batch.

Shape suffixes: B slots, G slots of a group, T tokens of a sequence.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from spectr_jax.decoding import request as requests
from spectr_jax.decoding.drafters import Sequences
from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.loop import Loop, Observe, begin, call_and_observe
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, PolicyRows, for_rows
from spectr_jax.decoding.request import AnyModel, Request, over_mesh
from spectr_jax.decoding.stopping import StopSpec
from spectr_jax.decoding.tree import Keys, PerRow, check_positive
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.models.frozen import Frozen
from spectr_jax.utils import backend, hosts, sharding
from spectr_jax.utils.errors import UserError

CALLS, CALLS_ON_ACCELERATORS = 1, 8
"""Calls of one program. A sequence that ends leaves its slot after the program that follows the one
in which it ended. On a CPU a call takes much longer than the start of a program."""

GROUP, GROUP_ON_ACCELERATORS = 1, 4
"""Prompts on which the models run together. Fewer waste less time if few slots are free, and on an
accelerator more share one reading of the weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sequence.

    Attributes:
      index: of its prompt.
      prompt_length: the number of tokens of its prompt.
      tokens: [T] int32, prompt and continuation. A last token of -1 means that the target had no
        distribution there.
      target_calls: the number of target calls, without those on the prompt.
      emitted_per_call: [height + 2] int32, as in `Generation`.
      observed: the outputs of `observe`, summed over calls.
      logprobs: two arrays [T], see `Logprobs`; None unless requested.
      batch_calls: the number of calls of the batch so far. Until the last sequence, all slots take
        part in each, so `target_calls` of all sequences over `slots * batch_calls` is the share of
        slots in use.
    """

    index: int
    prompt_length: int
    tokens: Int[np.ndarray, " time"]
    target_calls: int
    emitted_per_call: Int[np.ndarray, " counts"]
    observed: Any
    logprobs: Logprobs | None
    batch_calls: int


@dataclasses.dataclass(frozen=True)
class _Prompt:
    index: int
    tokens: Int[np.ndarray, " time"]


_Held: TypeAlias = Sequence[_Prompt | None]


class _State(NamedTuple):
    """The state of all slots between calls."""

    loop: Loop
    batch_calls: PerRow  # The number of calls so far, the same for all slots.


def generate_all(
    key: PRNGKeyArray,
    method: Method,
    target: AnyModel,
    draft: AnyModel | None,
    prompts: Iterable[ArrayLike | Sequence[int]],
    max_new_tokens: int,
    slots: int = 8,
    policy: Policy | None = None,
    observe: Observe | None = None,
    mesh: Mesh | None = None,
    draft_policy: Policy | None = None,
    logprobs: bool = False,
    stop: StopSpec = None,
    prompt_piece: int | None = None,
    in_order: bool = False,
    skip: Collection[int] = (),
) -> Iterator[Completion]:
    """Continues any number of prompts; yields each sequence when it ends.

        prompts = [tokenizer.prompt(line) for line in lines]
        for done in generate_all(key, method, target, draft, prompts, 64, slots=16):
            print(done.index, tokenizer.decode(done.tokens))

    Sequence `i` has the key `fold_in(key, i)`: its tokens are those of `generate` for this key and
    prompt, whatever the number of slots and the other prompts. Two programs do all the work: one
    runs the models on new prompts, and one calls the target. For a list nothing is compiled after
    the first of each. For another iterable, whose longest prompt is not known, both are compiled
    again when a prompt is longer than all before it and than the next power of two. Arguments that
    are not listed are as in `generate`.

    Args:
      key: [] typed key; consumed.
      prompts: the tokens of each prompt, BOS first, without padding. All prompts of a list are
        checked before anything is decoded. Those of another iterable are read when slots are free.
      slots: the number of sequences that are decoded at the same time.
      policy: its numbers may have one value per prompt of a list. So may those of `draft_policy`.
      mesh: `slots` must be a multiple of the number of its groups of devices.
      in_order: whether to yield the sequences in the order of the prompts. A sequence then waits
        for those before it.
      skip: the indices of prompts to leave out, as a set if there are many; the others keep theirs.

    Raises:
      UserError: as in `generate`; raised by the call itself. If an iterable raises an error, or has
        a prompt that is out of range, the sequences in slots are finished and yielded first.
    """
    if getattr(key, "shape", ()) != ():
        given = f"{key.dtype}{list(key.shape)}"
        raise UserError(f"key={given}: must be a single key, such as jax.random.key(seed)")
    check_positive(slots=slots, max_new_tokens=max_new_tokens)
    several = len(prompts) if isinstance(prompts, Sized) else 1
    options: dict[str, Any] = {"draft_policy": draft_policy, "logprobs": logprobs, "stop": stop}
    options |= {"prompt_piece": prompt_piece, "rows": slots, "policies": several}
    options = requests.checked_options(method, target, draft, policy, observe, mesh, **options)
    requests.check_key(key, slots)
    read, longest = _read(prompts, max_new_tokens, options["target"]), 0
    if isinstance(prompts, Sized):
        known = list(read)
        longest = max((len(prompt.tokens) for prompt in known), default=0)
        read = iter(known)  # With those to skip: the same program continues an evaluation.
    wanted = (prompt for prompt in read if prompt.index not in skip)
    policy = options.pop("policy") or Policy()
    draft_policy = options.pop("draft_policy") or policy
    arguments = _Arguments(
        key=key,
        max_new_tokens=max_new_tokens,
        policy=for_rows(policy, several),
        draft_policy=for_rows(draft_policy, several),
        options=options,
    )
    completions = _decode(arguments, wanted, slots, requests.padded_length(longest))
    return _by_index(completions, skip) if in_order else completions


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments:
    """What all requests share: the checked arguments, with a policy for each prompt or one for all."""

    key: PRNGKeyArray
    max_new_tokens: int
    policy: PolicyRows
    draft_policy: PolicyRows
    options: dict[str, Any]

    def request(self, prompts: _Held, is_new: Bool[np.ndarray, " batch"], length: int) -> Request:
        """Returns the request of the prompts in all slots. Only those that are new have tokens."""
        slots = len(prompts)
        tokens, lengths = np.zeros((slots, length), np.int32), np.ones(slots, np.int32)
        limits, indices = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        for slot, prompt in enumerate(prompts):
            if prompt is None:
                continue
            indices[slot], limits[slot] = prompt.index, len(prompt.tokens) + self.max_new_tokens
            if is_new[slot]:
                lengths[slot] = len(prompt.tokens)
                tokens[slot, : lengths[slot]] = prompt.tokens
        request: Any = requests.request_of(
            _keys(self.key, indices),
            prompts=Sequences(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths)),
            max_new_tokens=self.max_new_tokens,
            room=requests.padded_room(self.max_new_tokens),
            **self.options,
        )

        def own(policy: PolicyRows) -> PolicyRows:
            return policy.of(np.minimum(indices, len(policy.eos) - 1))

        policies = {"policy": own(self.policy), "draft_policy": own(self.draft_policy)}
        return dataclasses.replace(request, limits=limits, **policies)


def _read(prompts: Iterable[Any], max_new_tokens: int, target: Frozen) -> Iterator[_Prompt]:
    """Yields the prompts; raises `UserError` for one that is out of range."""
    for index, prompt in enumerate(prompts):
        name = f"prompts[{index}]"
        tokens = requests.whole_numbers(name, prompt)
        if tokens.ndim != 1 or not tokens.size:
            raise UserError(f"{name}: must be a sequence of tokens; a prompt needs at least BOS")
        requests.check_tokens(name, tokens, len(tokens), max_new_tokens, target)
        yield _Prompt(index, tokens)


def _decode(
    arguments: _Arguments, read: Iterator[_Prompt], slots: int, length: int
) -> Iterator[Completion]:
    """Yields each sequence when it ends.

    `length` is the padded length of the longest prompt, or 0 if that is not known. The host reads
    what a program has computed while the next one runs.
    """
    on_accelerator = GROUP_ON_ACCELERATORS, CALLS_ON_ACCELERATORS
    group, calls = (GROUP, CALLS) if backend.on_cpu() else on_accelerator
    held: list[_Prompt | None] = [None] * slots
    state: Any = None
    ran: Any = None  # The output of the program before, with the prompts that it had.
    failure: Exception | None = None
    while True:
        free = [slot for slot in range(slots) if held[slot] is None]
        new, failed = _take(read, len(free))
        failure = failure or failed
        if new:
            for slot, prompt in zip(free, new, strict=False):
                held[slot] = prompt
            fits = state is not None
            if (longest := max(len(prompt.tokens) for prompt in new)) > length:
                length, fits = max(requests.BUCKET, 1 << (longest - 1).bit_length()), False
            is_new = np.isin(np.arange(slots), free[: len(new)])
            request = arguments.request(held, is_new, length)
            state = state if fits else resized(state, request)
            state = start(state, request, is_new, group)
        if held.count(None) == slots:
            break
        state, seen = advance(state, request, calls)
        running = seen, tuple(held)
        for slot, completion in _ended(ran, held):
            held[slot] = None
            yield completion
        ran = running
    if failure is not None:
        raise failure


def _take(read: Iterator[_Prompt], most: int) -> tuple[list[_Prompt], Exception | None]:
    """Returns at most `most` of the next prompts, and the error that ended them, if any."""
    taken: list[_Prompt] = []
    try:
        for prompt in itertools.islice(read, most):
            taken.append(prompt)
    except Exception as error:  # Raised once the sequences in slots have been yielded.
        return taken, error
    return taken, None


def _ended(ran: tuple[_State, _Held] | None, held: _Held) -> list[tuple[int, Completion]]:
    """Returns the sequences that had ended after a program, with their slots.

    A slot whose prompt has changed since the program started has been read before.
    """
    if ran is None:
        return []
    seen, prompts = ran
    done = hosts.fetch(seen.loop.done)
    same = {slot: prompt for slot, prompt in enumerate(prompts) if prompt and prompt is held[slot]}
    ended = {slot: prompt for slot, prompt in same.items() if done[slot]}
    if not ended:
        return []
    seen = hosts.fetch(seen)
    return [(slot, _completion(prompt, seen, slot)) for slot, prompt in ended.items()]


def _completion(prompt: _Prompt, seen: _State, slot: int) -> Completion:
    """Returns the sequence in a slot, from NumPy arrays."""
    loop: Any = jax.tree.map(lambda rows: rows[slot], seen.loop)
    length = int(loop.sequences.lengths)

    def cut(row: Any) -> Any:
        return np.array(row[:length])

    return Completion(
        index=prompt.index,
        prompt_length=len(prompt.tokens),
        tokens=cut(loop.sequences.tokens),
        target_calls=int(loop.calls),
        emitted_per_call=loop.emitted_per_call,
        observed=loop.observed,
        logprobs=jax.tree.map(cut, loop.logprobs),
        batch_calls=int(seen.batch_calls[slot]),
    )


def _by_index(completions: Iterator[Completion], skip: Collection[int]) -> Iterator[Completion]:
    """Yields sequences in the order of their prompts."""
    indices = (index for index in itertools.count() if index not in skip)
    waiting: dict[int, Completion] = {}
    following = next(indices)
    for completion in completions:
        waiting[completion.index] = completion
        while following in waiting:
            yield waiting.pop(following)
            following = next(indices)


@jax.jit
def _keys(key: PRNGKeyArray, indices: Int[Array, " batch"]) -> Keys:
    """Returns `fold_in(key, i)` for each index."""
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, indices)


def _begin(request: Request) -> Loop:
    """Returns the state after the prompts of a request."""
    rows = request.prompts, request.room, request.logprobs, request.observe
    return begin(request.setup(), *rows)


@jax.jit
def resized(state: _State | None, request: Request) -> _State:
    """Returns the state with room for the request's prompts; of empty slots, if it is None."""

    def resize(request: Request, state: _State | None) -> _State:
        loop = zeros_like_output(_begin, request)
        loop = loop._replace(done=jnp.ones_like(loop.done))
        empty = _State(loop=loop, batch_calls=jnp.zeros_like(request.limits))
        return empty if state is None else _placed(empty, state, jnp.arange(len(request.limits)))

    return over_mesh(resize, request, state)


@functools.partial(jax.jit, donate_argnames="state", static_argnames="group")
def start(state: _State, request: Request, is_new_B: Bool[Array, " batch"], group: int) -> _State:
    """Runs the models on the new prompts, at most `group` together; returns the state with them."""

    def begin_new(request: Request, state: _State, is_new_B: Bool[Array, " batch"]) -> _State:
        B = len(is_new_B)
        G = min(group, B)
        order_B = jnp.argsort(~is_new_B, stable=True)

        def step(number: Any, loop: Loop) -> Loop:
            # The last group may repeat slots of the one before, with the same result.
            rows_G = jax.lax.dynamic_slice_in_dim(order_B, number * G, G)
            places_G = jnp.where(is_new_B[rows_G], rows_G, B)
            return _placed(loop, _begin(request.of(rows_G)), places_G)

        groups = (sharding.over_groups(jnp.sum(is_new_B)) + G - 1) // G
        return state._replace(loop=jax.lax.fori_loop(0, groups, step, state.loop))

    return over_mesh(begin_new, request, state, is_new_B)


def _placed(rows: Any, new: Any, places_G: Int[Array, " group"]) -> Any:
    """Returns `rows` with row g of `new` in row `places_G[g]`, unless that is past the end.

    Rows of `new` may be shorter.
    """

    def put(rows_B: Array, new_G: Array) -> Array:
        if new_G.dtype != rows_B.dtype:  # The cache of one sequence is not stored as integers.
            new_G = jax.lax.bitcast_convert_type(new_G, rows_B.dtype)
        missing = [size - own for size, own in zip(rows_B.shape[1:], new_G.shape[1:], strict=True)]
        padded = jnp.pad(new_G, [(0, 0), *((0, size) for size in missing)])
        return rows_B.at[places_G].set(padded, mode="drop")

    return jax.tree.map(put, rows, new)


@functools.partial(jax.jit, donate_argnames="state", static_argnames="calls")
def advance(state: _State, request: Request, calls: int) -> tuple[_State, _State]:
    """Calls the target at most `calls` times; returns the state, and a copy without caches."""

    def make_calls(request: Request, state: _State) -> _State:
        setup = request.setup()

        def step(carry: tuple[Any, Loop]) -> tuple[Any, Loop]:
            return carry[0] + 1, call_and_observe(carry[1], setup, request.observe)

        def any_left(carry: tuple[Any, Loop]) -> Array:
            return (carry[0] < calls) & sharding.over_groups(~jnp.all(carry[1].done))

        count, loop = jax.lax.while_loop(any_left, step, (jnp.int32(0), state.loop))
        return _State(loop=loop, batch_calls=state.batch_calls + count)

    after = over_mesh(make_calls, request, state)
    caches: dict[str, Any] = dict.fromkeys(("target_cache", "drafter_state", "stop_states"))
    return after, after._replace(loop=after.loop._replace(**caches))
