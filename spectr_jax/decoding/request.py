"""The checked arguments of `generate`, `generate_all` and `stream`, as a pytree that passes through
`jax.jit`."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PRNGKeyArray

from spectr_jax.decoding import processing, stopping
from spectr_jax.decoding.drafters import Sequences, Setup
from spectr_jax.decoding.loop import Loop, Observe, begin
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, PolicyRows, check_policy, for_rows
from spectr_jax.decoding.stopping import Stop, StopSpec
from spectr_jax.decoding.tree import Keys, PerRow, check_positive
from spectr_jax.models import parallel
from spectr_jax.models.base import Model
from spectr_jax.models.frozen import Frozen, Trained, check_context, freeze
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError

Result = TypeVar("Result")
AnyModel: TypeAlias = Model | Frozen | Trained
Tokens: TypeAlias = ArrayLike | Sequence[Sequence[int]]

BUCKET = 16
"""The padded length of prompts, and the room for new tokens, are multiples of this."""

LONG = 256
"""Prompts of `stream`, and prompts that are longer, are padded to a multiple of this."""

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What a generation starts from.

    Attributes:
      keys: [B], one per sequence; or one for all.
      prompts: tokens [B, T] and lengths [B].
      limits: [B] int32, the largest length of each sequence.
      room: static; at least the number of new tokens of each sequence.
    """

    keys: PRNGKeyArray | Keys
    method: Method = dataclasses.field(metadata=STATIC)
    target: Frozen
    draft: Frozen | None
    prompts: Sequences
    limits: PerRow
    room: int = dataclasses.field(metadata=STATIC)
    policy: PolicyRows
    draft_policy: PolicyRows
    observe: Observe | None = dataclasses.field(default=None, metadata=STATIC)
    mesh: Mesh | None = dataclasses.field(default=None, metadata=STATIC)
    logprobs: bool = dataclasses.field(default=False, metadata=STATIC)
    stop: Stop | None = None
    prompt_piece: int | None = dataclasses.field(default=None, metadata=STATIC)

    def of(self, rows: Int[Array, " rows"]) -> "Request":
        """Returns the request of some of the sequences, if each has its own key."""
        policies: dict[str, Any] = {
            "policy": self.policy.of(rows),
            "draft_policy": self.draft_policy.of(rows),
        }
        own = self.keys, self.prompts, self.limits
        keys, prompts, limits = jax.tree.map(lambda values_B: values_B[rows], own)
        return dataclasses.replace(self, keys=keys, prompts=prompts, limits=limits, **policies)

    def setup(self) -> Setup:
        """Returns what stays the same during the generation; the models are merged."""
        return Setup(
            tree=self.method.tree,
            drafter=self.method.drafter_for(self.draft),
            verifier=self.method.verifier,
            target=self.target.merge(),
            draft=None if self.draft is None else self.draft.merge(),
            keys=sequence_keys(self.keys, len(self.limits)),
            limits=self.limits,
            policy=self.policy,
            draft_policy=self.draft_policy,
            stop=self.stop,
            prompt_piece=self.prompt_piece,
        )


def request_of(
    key: PRNGKeyArray | Keys,
    method: Method,
    target: Frozen,
    draft: Frozen | None,
    prompts: Sequences,
    max_new_tokens: int,
    room: int,
    policy: Policy | None = None,
    draft_policy: Policy | None = None,
    **options: Any,
) -> Request:
    """Returns a request, with defaults for both policies; `options` are its other fields."""
    policy = policy or Policy()
    return Request(
        keys=key,
        method=method,
        target=target,
        draft=draft if method.takes_draft else None,
        prompts=prompts,
        limits=prompts.lengths + np.int32(max_new_tokens),
        room=room,
        policy=for_rows(policy, len(prompts.lengths)),
        draft_policy=for_rows(draft_policy or policy, len(prompts.lengths)),
        **options,
    )


def checked(
    key: PRNGKeyArray | Keys,
    method: Method,
    target: AnyModel,
    draft: AnyModel | None,
    prompts: Tokens,
    prompt_lengths: ArrayLike | Sequence[int],
    max_new_tokens: int,
    policy: Policy | None = None,
    observe: Observe | None = None,
    mesh: Mesh | None = None,
    draft_policy: Policy | None = None,
    logprobs: bool = False,
    stop: StopSpec = None,
    prompt_piece: int | None = None,
    *,
    bucket: int = BUCKET,
) -> Request:
    """Returns the request of `generate`; prompts are padded to a multiple of `bucket`.

    Raises:
      UserError: as in `generate`.
    """
    tokens: Any = whole_numbers("prompts", prompts)
    lengths: Any = whole_numbers("prompt_lengths", prompt_lengths)
    options: dict[str, Any] = {"draft_policy": draft_policy, "logprobs": logprobs, "stop": stop}
    options |= {"prompt_piece": prompt_piece, "rows": len(tokens)}
    options = checked_options(method, target, draft, policy, observe, mesh, **options)
    _check_prompts(tokens, lengths, max_new_tokens, options["target"])
    check_key(key, len(tokens))
    missing = padded_length(tokens.shape[1], bucket) - tokens.shape[1]
    padded: Any = np.pad(tokens, ((0, 0), (0, missing)))
    rows = Sequences(tokens=padded, lengths=lengths), max_new_tokens, padded_room(max_new_tokens)
    return request_of(key, prompts=rows[0], max_new_tokens=rows[1], room=rows[2], **options)


def checked_options(
    method: Method,
    target: AnyModel,
    draft: AnyModel | None,
    policy: Policy | None,
    observe: Observe | None,
    mesh: Mesh | None,
    draft_policy: Policy | None,
    logprobs: bool,
    stop: StopSpec,
    prompt_piece: int | None,
    *,
    rows: int,
    policies: int | None = None,
) -> dict[str, Any]:
    """Returns the arguments of `request_of` other than the key and the prompts.

    Args:
      rows: the number of sequences of a batch.
      policies: the number of sequences for which a policy has values; `rows` by default.

    Raises:
      UserError: as in `generate`.
    """
    if not isinstance(method, Method):
        raise UserError(f"method={method!r}: must be a Method, such as get_method('speculative')")
    if not isinstance(observe, Hashable) or not (observe is None or callable(observe)):
        raise UserError(f"observe={observe!r}: must be a hashable function of one Call, or None")
    if not isinstance(logprobs, bool):
        raise UserError(f"logprobs={logprobs!r}: must be True or False")
    if prompt_piece is not None:
        check_positive(prompt_piece=prompt_piece)
    drafted = method.takes_draft and draft is not None
    models = freeze(target), freeze(draft) if drafted else None  # type: ignore[arg-type]
    _check_models(method, *models)
    for wanted, owner in ((policy, ""), (draft_policy, "draft_")):
        if wanted is not None:
            check_policy(wanted, rows if policies is None else policies, owner)
            processing.check_vocabulary(wanted.process, models[0].vocab_size)
    if mesh is None:
        _check_alone(models[0])
    else:
        _check_mesh(mesh, rows)
        models = parallel.pair_on_mesh(mesh, *models)
    automaton = stopping.prepared(stop, getattr(target, "tokenizer", None), models[0].vocab_size)
    options: dict[str, Any] = {"method": method, "target": models[0], "draft": models[1]}
    options |= {"policy": policy, "draft_policy": draft_policy, "observe": observe, "mesh": mesh}
    return options | {"logprobs": logprobs, "stop": automaton, "prompt_piece": prompt_piece}


def begun(request: Request) -> Loop:
    """Returns the state of the loop after the prompts."""
    rows = request.prompts, request.room, request.logprobs, request.observe
    return begin(request.setup(), *rows)


def over_mesh(function: Callable[..., Result], request: Request, *state: Any) -> Result:
    """Returns `function(request, *state)`; with a mesh, each group of devices takes its sequences.

    All arrays of `state` and of the result have a leading dimension for the sequences. The compiler
    divides the work of a group over its devices, along the axis `model`.
    """
    if request.mesh is None:
        return function(request, *state)
    copies: Any = PartitionSpec()
    rows: Any = sharding.ROWS
    policy = PolicyRows(shaping=rows, eos=rows, process=copies)
    specs: dict[str, Any] = dict.fromkeys(("target", "draft", "stop"), copies)
    specs |= dict.fromkeys(("keys", "prompts", "limits"), rows)
    request = dataclasses.replace(request, keys=sequence_keys(request.keys, len(request.limits)))
    share = dataclasses.replace(request, policy=policy, draft_policy=policy, **specs)
    return jax.shard_map(
        function,
        mesh=request.mesh,
        in_specs=(share, *[rows] * len(state)),
        out_specs=rows,
        axis_names=set(sharding.AXES) - {sharding.MODEL},
        check_vma=False,
    )(request, *state)


def whole_numbers(name: str, values: Any) -> Int[np.ndarray, "..."]:
    """Returns `values` as an int32 array.

    Raises:
      UserError: a value is not an integer or is outside int32, or rows differ in length.
    """
    help_ = "give tokens, such as those of `tokenizer.prompts`"
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        if isinstance(values, Sequence):
            raise UserError(f"{name}: the rows have unequal lengths; pad them") from error
        raise UserError(f"{name}: is a {type(values).__name__}; {help_}") from error
    if array.dtype.kind not in "iuf" or np.any(array != np.floor(array)):
        raise UserError(f"{name}: must be integers, not {array.dtype}; {help_}")
    beyond = array[(array < -(2**31)) | (array >= 2**31)]
    if beyond.size:
        raise UserError(f"{name}: {beyond[0]} is outside int32; {help_}")
    return array.astype(np.int32)


def one_sequence(name: str, values: Any) -> Int[np.ndarray, " time"]:
    """Returns the tokens of one sequence as an int32 array.

    Raises:
      UserError: it is something else, or empty.
    """
    tokens = whole_numbers(name, values)
    if tokens.ndim != 1 or not tokens.size:
        raise UserError(f"{name}: must be a sequence of tokens; it needs at least BOS")
    return tokens


def _check_prompts(
    tokens: Int[np.ndarray, "..."],
    lengths: Int[np.ndarray, "..."],
    max_new_tokens: int,
    target: Frozen,
) -> None:
    """Raises `UserError` unless the prompts fit each other and the target."""
    check_positive(max_new_tokens=max_new_tokens)
    if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
        shapes = f"prompts {tokens.shape} and prompt_lengths {lengths.shape}"
        raise UserError(f"{shapes}: must have shapes [B, T] and [B]")
    if not len(tokens) or lengths.min() < 1 or lengths.max() > tokens.shape[1]:
        within = f"1..{tokens.shape[1]}; a prompt needs at least BOS"
        raise UserError(f"prompt_lengths={lengths}: must be within {within}")
    check_tokens("prompts", tokens, int(lengths.max()), max_new_tokens, target)


def check_tokens(
    name: str, tokens: Int[np.ndarray, "..."], longest: int, max_new_tokens: int, target: Frozen
) -> None:
    """Raises `UserError` unless `tokens` are the target's, and its context has room for new ones."""
    V = target.vocab_size
    if tokens.min() < 0 or tokens.max() >= V:
        raise UserError(f"{name}: a token is outside 0..{V - 1}; use the target's tokenizer")
    asked = f"{name} of {longest} tokens, max_new_tokens={max_new_tokens}"
    check_context(asked, longest + max_new_tokens, target, "lower one of them")


def _check_models(method: Method, target: Frozen, draft: Frozen | None) -> None:
    """Raises `UserError` unless the models fit the method."""
    owner, rule, V = f"method {method.name!r}", method.verifier.rule, target.vocab_size
    children = method.tree.children_table.shape[1]
    if rule is not None and rule.distinct and children > V:
        hint = f"but there are {V} tokens; give a narrower tree"
        raise UserError(f"{owner}: a node has {children} children, {hint}")
    if method.needs_draft and draft is None:
        raise UserError(f"{owner}: needs a draft model; give one, or use 'recycle'")
    if draft is not None and draft.vocab_size != V:
        hint = "use a common vocabulary, or spectr_jax.loading.pairs.fitted"
        raise UserError(f"draft: has {draft.vocab_size} tokens, but the target has {V}; {hint}")
    method.drafter_for(draft).check(target, draft)


def check_key(key: Any, sequences: int | None) -> None:
    """Raises `UserError` unless `key` is one typed key, or one for each of `sequences`."""
    dtype = getattr(key, "dtype", np.dtype(bool))
    is_typed = jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed or key.shape not in ((), (sequences,)):
        name = f"{key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
        several = "" if sequences is None else f", or {sequences} of them"
        wanted = f"must be a single typed key, such as jax.random.key(seed){several}"
        raise UserError(f"key={name}: {wanted}")
    if "rbg" in str(jax.random.key_impl(key)):  # Under vmap, all rows draw from the first key.
        hint = "give jax.random.key(seed, impl='threefry2x32')"
        raise UserError(f"key={key.dtype}: sequences would share random bits; {hint}")


def _check_alone(target: Frozen) -> None:
    """Raises `UserError` if the target is split over devices: its program needs their mesh."""
    for leaf in target.leaves:
        place = getattr(leaf, "sharding", None)
        if not isinstance(place, NamedSharding) or place.mesh.axis_names != sharding.AXES:
            continue
        if place.mesh.shape[sharding.MODEL] > 1:
            raise UserError("mesh=None: the target is split over devices; give the mesh of `load`")


def _check_mesh(mesh: Mesh, sequences: int) -> None:
    """Raises `UserError` unless `mesh` comes from `make_mesh` and divides the sequences."""
    sharding.check_mesh(mesh)
    if sequences % (groups := sharding.groups_of(mesh)):
        raise UserError(
            f"mesh: has {groups} groups of devices, which do not divide {sequences} prompts; give a "
            "multiple, or one group: make_mesh(model=N, devices=jax.devices()[:N])"
        )


def padded_length(tokens: int, bucket: int = BUCKET) -> int:
    """Returns the padded length of prompts of `tokens` tokens; one program serves many lengths."""
    bucket = bucket if tokens <= LONG else LONG
    return -(-tokens // bucket) * bucket


def next_length(tokens: int) -> int:
    """Returns the padded length of prompts of up to `tokens` tokens so far: a power of 2."""
    return max(BUCKET, 1 << (tokens - 1).bit_length())


def padded_room(max_new_tokens: int) -> int:
    """Returns the room for new tokens; one program serves several limits."""
    return -(-max_new_tokens // BUCKET) * BUCKET


def sequence_keys(key: PRNGKeyArray | Keys, sequences: int) -> Keys:
    """Returns one key per sequence: `key` itself, or `fold_in(key, i)` if it is a single key."""
    if key.ndim:
        return key
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, np.arange(sequences))
