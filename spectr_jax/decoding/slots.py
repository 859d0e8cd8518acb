"""A list of prompts through a fixed number of slots: `generate_all`.

A slot is a row of the batch. A sequence that ends leaves its slot, and the next prompt takes it, so
that no slot waits for the longest sequence of a batch.

Shape suffixes: B slots, G slots of a group, T tokens of a sequence.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from spectr_jax.decoding import request as requests
from spectr_jax.decoding import running
from spectr_jax.decoding.drafters import Sequences
from spectr_jax.decoding.logprobs import Logprobs
from spectr_jax.decoding.loop import Loop, Observe, call_and_observe
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, has_rows
from spectr_jax.decoding.request import AnyModel, Request, begun, over_mesh
from spectr_jax.decoding.stopping import StopSpec
from spectr_jax.decoding.tree import Keys, check_positive
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
    """

    index: int
    prompt_length: int
    tokens: Int[np.ndarray, " time"]
    target_calls: int
    emitted_per_call: Int[np.ndarray, " counts"]
    observed: Any = None
    logprobs: Logprobs | None = None


@dataclasses.dataclass(frozen=True)
class _Prompt:
    index: int
    tokens: Int[np.ndarray, " time"]
    limit: int  # The largest length of its sequence.


_Held: TypeAlias = Sequence[_Prompt | None]
"""The prompt of the sequence in each slot."""


def generate_all(
    key: PRNGKeyArray,
    method: Method,
    target: AnyModel,
    draft: AnyModel | None,
    prompts: Iterable[ArrayLike | Sequence[int]],
    max_new_tokens: int,
    policy: Policy | None = None,
    observe: Observe | None = None,
    mesh: Mesh | None = None,
    draft_policy: Policy | None = None,
    logprobs: bool = False,
    stop: StopSpec = None,
    prompt_piece: int | None = None,
    *,
    slots: int = 8,
    in_order: bool = False,
    skip: Collection[int] = (),
) -> Iterator[Completion]:
    """Continues any number of prompts; yields each sequence when it ends.

        prompts = [tokenizer.prompt(line) for line in lines]
        for done in generate_all(key, method, target, draft, prompts, 64, Policy(eos=tokenizer.eos)):
            print(done.index, tokenizer.decode(done.tokens))

    Sequence `i` has the tokens that `generate` gives to row `i` of a batch of all prompts, whatever
    the number of slots: both fold `i` into the key. Two programs do all the work: one runs the
    models on new prompts, and one calls the target. For a list, both are compiled once. For another
    iterable, whose longest prompt is not known, they are compiled again when a prompt is longer
    than the power of two that held all before it. Arguments that are not listed are as in
    `generate`.

    Args:
      key: [] typed key; consumed.
      prompts: the tokens of each prompt, BOS first, without padding. All prompts of a list are
        checked before anything is decoded. Those of another iterable are read when slots are free.
      policy: its numbers may have one value per prompt of a list. So may those of `draft_policy`.
      mesh: `slots` must be a multiple of the number of its groups of devices.
      slots: the number of sequences that are decoded at the same time; at most that of a list's
        prompts is used.
      in_order: whether to yield the sequences in the order of the prompts. A sequence then waits
        for those before it.
      skip: the indices of prompts to leave out; the others keep theirs.

    Raises:
      UserError: as in `generate`; raised by the call itself. If an iterable raises an error, or has
        a prompt that is out of range, the sequences in slots are finished and yielded first.
    """
    requests.check_key(key, None)
    check_positive(slots=slots, max_new_tokens=max_new_tokens)
    several = _number_of(prompts, policy, draft_policy)
    on_accelerator = GROUP_ON_ACCELERATORS, CALLS_ON_ACCELERATORS
    group, calls = (GROUP, CALLS) if backend.on_cpu() else on_accelerator
    # The default of `generate` depends on the rows of a program, and so would lengths of caches.
    piece = prompt_piece or running.piece_length(min(group, slots))
    options: Any = policy, observe, mesh, draft_policy, logprobs, stop, piece
    rows: dict[str, Any] = {"rows": slots, "policies": several or 1}
    checked = requests.checked_options(method, target, draft, *options, **rows)
    read, longest = _read(prompts, max_new_tokens, checked["target"]), 0
    left_out = frozenset(skip)
    if several is not None:
        known = list(read)  # With those to skip: a continued evaluation has the same program.
        longest, read = max((len(prompt.tokens) for prompt in known), default=0), iter(known)
        groups = 1 if mesh is None else sharding.groups_of(mesh)
        slots = min(slots, max(1, -(-several // groups)) * groups)  # Others would stay empty.
    none: Any = np.zeros((rows["policies"], 0), np.int32), np.zeros(rows["policies"], np.int32)
    checked |= {"max_new_tokens": max_new_tokens, "room": requests.padded_room(max_new_tokens)}
    completions = _decode(
        requests.request_of(key, prompts=Sequences(*none), **checked),
        (prompt for prompt in read if prompt.index not in left_out),
        requests.padded_length(longest),
        slots=slots,
        group=group,
        calls=calls,
    )
    return _by_index(completions, left_out) if in_order else completions


def _number_of(prompts: Any, *policies: Policy | None) -> int | None:
    """Returns the number of prompts of a list, or None for another iterable.

    Raises:
      UserError: `prompts` is not iterable, or its length is unknown and a policy has one value per
        prompt.
    """
    is_array = isinstance(prompts, (np.ndarray, jax.Array))
    if isinstance(prompts, Sequence) or (is_array and prompts.ndim):
        return len(prompts)
    if is_array or not isinstance(prompts, Iterable):
        raise UserError(f"prompts={prompts!r}: must be an iterable of sequences of tokens")
    if any(map(has_rows, policies)):
        raise UserError(
            "policy: has one value per prompt; give the prompts as a list, or one value"
        )
    return None


def _read(prompts: Iterable[Any], max_new_tokens: int, target: Frozen) -> Iterator[_Prompt]:
    """Yields the prompts; raises `UserError` for one that is out of range."""
    for index, prompt in enumerate(prompts):
        name = f"prompts[{index}]"
        tokens = requests.one_sequence(name, prompt)
        requests.check_tokens(name, tokens, len(tokens), max_new_tokens, target)
        yield _Prompt(index, tokens, len(tokens) + max_new_tokens)


def _until_error(prompts: Iterator[_Prompt], errors: list[Exception]) -> Iterator[_Prompt]:
    """Yields the prompts up to an error, which is added to `errors`."""
    try:
        yield from prompts
    except Exception as error:
        errors.append(error)


def _decode(
    shared: Request, prompts: Iterator[_Prompt], length: int, *, slots: int, group: int, calls: int
) -> Iterator[Completion]:
    """Yields each sequence when it ends.

    `shared` is a request with the policies of all prompts. `length` is the padded length of the
    longest prompt, or 0 if that is not known. The host reads what a program has computed while the
    next one runs.
    """
    held: list[_Prompt | None] = [None] * slots
    loop: Any = None
    before: tuple[Loop, _Held] | None = None  # What the program before computed, and of what.
    errors: list[Exception] = []
    prompts = _until_error(prompts, errors)
    while True:
        free = [slot for slot in range(slots) if held[slot] is None]
        if new := list(itertools.islice(prompts, len(free))):
            for slot, prompt in zip(free, new, strict=False):
                held[slot] = prompt
            longest = max(len(prompt.tokens) for prompt in new)
            if grows := longest > length:
                length = requests.next_length(longest)
            is_new = np.isin(np.arange(slots), free[: len(new)])
            request = _of_slots(shared, held, is_new, length)
            if grows or loop is None:
                loop = resized(loop, request)
            loop = start(loop, request, is_new, group)
        if held.count(None) == slots:
            break
        loop, seen = advance(loop, request, calls)
        now = seen, tuple(held)
        for slot, completion in _ended(before, held):
            held[slot] = None
            yield completion
        before = now
    for error in errors:
        raise error


def _of_slots(
    shared: Request, held: _Held, is_new: Bool[np.ndarray, " batch"], length: int
) -> Request:
    """Returns the request of the sequences in all slots. Only new prompts have tokens."""
    tokens: Any = np.zeros((len(held), length), np.int32)
    lengths: Any = np.ones(len(held), np.int32)
    limits, indices = np.zeros_like(lengths), np.zeros_like(lengths)
    for slot, prompt in enumerate(held):
        if prompt is not None:
            indices[slot], limits[slot] = prompt.index, prompt.limit
        if prompt is not None and is_new[slot]:
            lengths[slot] = len(prompt.tokens)
            tokens[slot, : lengths[slot]] = prompt.tokens
    rows: Any = np.minimum(indices, len(shared.limits) - 1)  # One policy serves an iterable.
    own: dict[str, Any] = {"prompts": Sequences(tokens=tokens, lengths=lengths), "limits": limits}
    own |= {name: getattr(shared, name).of(rows) for name in ("policy", "draft_policy")}
    return dataclasses.replace(shared, keys=_keys(shared.keys, indices), **own)


def _ended(before: tuple[Loop, _Held] | None, held: _Held) -> list[tuple[int, Completion]]:
    """Returns the sequences that had ended after a program, with their slots.

    A slot whose prompt has changed since the program started has been read before.
    """
    if before is None:
        return []
    seen, prompts = before
    done = hosts.fetch(seen.done)
    same = {slot: prompt for slot, prompt in enumerate(prompts) if prompt and prompt is held[slot]}
    ended = {slot: prompt for slot, prompt in same.items() if done[slot]}
    if not ended:
        return []
    seen = hosts.fetch(seen)
    return [(slot, _completion(prompt, seen, slot)) for slot, prompt in ended.items()]


def _completion(prompt: _Prompt, seen: Loop, slot: int) -> Completion:
    """Returns the sequence in a slot, from NumPy arrays."""
    row: Any = jax.tree.map(lambda rows: np.array(rows[slot]), seen)
    length = int(row.sequences.lengths)
    return Completion(
        index=prompt.index,
        prompt_length=len(prompt.tokens),
        tokens=row.sequences.tokens[:length],
        target_calls=int(row.calls),
        emitted_per_call=row.emitted_per_call,
        observed=row.observed,
        logprobs=jax.tree.map(lambda values: values[:length], row.logprobs),
    )


def _by_index(completions: Iterator[Completion], skip: frozenset[int]) -> Iterator[Completion]:
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


@jax.jit
def resized(loop: Loop | None, request: Request) -> Loop:
    """Returns the loop with room for the request's prompts; of empty slots, if it is None."""

    def resize(request: Request, loop: Loop | None) -> Loop:
        empty = zeros_like_output(begun, request)
        empty = empty._replace(done=jnp.ones_like(empty.done))
        return empty if loop is None else _placed(empty, loop, jnp.arange(len(request.limits)))

    return over_mesh(resize, request, loop)


@functools.partial(jax.jit, donate_argnames="loop", static_argnames="group")
def start(loop: Loop, request: Request, is_new_B: Bool[Array, " batch"], group: int) -> Loop:
    """Runs the models on the new prompts, at most `group` together; returns the loop with them."""

    def begin_new(request: Request, loop: Loop, is_new_B: Bool[Array, " batch"]) -> Loop:
        B = len(is_new_B)
        G = min(group, B)
        order_B = jnp.argsort(~is_new_B, stable=True)

        def step(number: Any, loop: Loop) -> Loop:
            # The last group may repeat slots of the one before, with the same result.
            rows_G = jax.lax.dynamic_slice_in_dim(order_B, number * G, G)
            places_G = jnp.where(is_new_B[rows_G], rows_G, B)
            return _placed(loop, begun(request.of(rows_G)), places_G)

        groups = (sharding.over_groups(jnp.sum(is_new_B)) + G - 1) // G
        return jax.lax.fori_loop(0, groups, step, loop)

    return over_mesh(begin_new, request, loop, is_new_B)


def _placed(loop: Loop, new: Loop, places_G: Int[Array, " group"]) -> Loop:
    """Returns `loop` with row g of `new` in row `places_G[g]`, unless that is past the end.

    Rows of `new` may be shorter.
    """

    def put(rows_B: Array, new_G: Array) -> Array:
        if new_G.dtype != rows_B.dtype:  # The cache of one sequence is not stored as integers.
            new_G = jax.lax.bitcast_convert_type(new_G, rows_B.dtype)
        missing = [size - own for size, own in zip(rows_B.shape[1:], new_G.shape[1:], strict=True)]
        padded = jnp.pad(new_G, [(0, 0), *((0, size) for size in missing)])
        return rows_B.at[places_G].set(padded, mode="drop")

    return jax.tree.map(put, loop, new)


@functools.partial(jax.jit, donate_argnames="loop", static_argnames="calls")
def advance(loop: Loop, request: Request, calls: int) -> tuple[Loop, Loop]:
    """Calls the target at most `calls` times; returns the loop, and a copy without caches."""

    def make_calls(request: Request, loop: Loop) -> Loop:
        setup = request.setup()

        def step(carry: tuple[Any, Loop]) -> tuple[Any, Loop]:
            return carry[0] + 1, call_and_observe(carry[1], setup, request.observe)

        def any_left(carry: tuple[Any, Loop]) -> Array:
            return (carry[0] < calls) & sharding.over_groups(~jnp.all(carry[1].done))

        return jax.lax.while_loop(any_left, step, (jnp.int32(0), loop))[1]

    after = over_mesh(make_calls, request, loop)
    caches: dict[str, Any] = dict.fromkeys(("target_cache", "drafter_state", "stop_states"))
    return after, after._replace(**caches)
