"""The checked arguments of `generate` and `stream`, as a pytree that passes through `jax.jit`."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from spectr_jax.decoding import checks, processing, stopping
from spectr_jax.decoding.drafters import Sequences, Setup
from spectr_jax.decoding.loop import Call, setup_of
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, PolicyRows, check_policy, for_rows
from spectr_jax.decoding.stopping import Stop, StopSpec
from spectr_jax.decoding.tree import Keys, PerRow
from spectr_jax.models.base import Model
from spectr_jax.models.frozen import Frozen, Trained, freeze
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError

AnyModel: TypeAlias = Model | Frozen | Trained
Observe: TypeAlias = Callable[[Call], Any]

BUCKET = 16
"""The padded length of prompts, and the room for new tokens, are multiples of this."""

LONG = 256
"""Prompts of `stream`, and prompts that are longer, are padded to a multiple of this."""

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
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
    observe: Observe | None = dataclasses.field(metadata=STATIC)
    mesh: Mesh | None = dataclasses.field(metadata=STATIC)
    logprobs: bool = dataclasses.field(metadata=STATIC)
    stop: Stop | None

    def setup(self) -> Setup:
        """Returns what stays the same during the generation; the models are merged."""
        return setup_of(
            self.method,
            self.target,
            self.draft,
            keys=sequence_keys(self.keys, len(self.limits)),
            limits=self.limits,
            policy=self.policy,
            draft_policy=self.draft_policy,
            stop=self.stop,
        )


def checked(
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
    *,
    bucket: int = BUCKET,
) -> Request:
    """Returns the arguments of `generate`, checked; prompts are padded to a multiple of `bucket`.

    Raises:
      UserError: as in `generate`.
    """
    policy = Policy() if policy is None else policy
    draft_policy = policy if draft_policy is None else draft_policy
    checks.check_method(method)
    if not isinstance(observe, Hashable) or not (observe is None or callable(observe)):
        raise UserError(f"observe={observe!r}: must be a hashable function of one Call, or None")
    if not isinstance(logprobs, bool):
        raise UserError(f"logprobs={logprobs!r}: must be True or False")
    tokens = checks.whole_numbers("prompts", prompts)
    lengths: Any = checks.whole_numbers("prompt_lengths", prompt_lengths)
    drafts = method.needs_draft and draft is not None
    models = freeze(target), freeze(draft) if drafts else None  # type: ignore[arg-type]
    checks.check_request(method, *models, tokens, lengths, max_new_tokens)
    checks.check_key(key, len(tokens))
    tokenizer = getattr(target, "tokenizer", None)
    for each, owner in ((policy, ""), (draft_policy, "draft_")):
        check_policy(each, len(tokens), owner)
        processing.check_vocabulary(each.process, models[0].vocab_size)
    if mesh is not None:
        _check_mesh(mesh, len(tokens))
        models = sharding.replicate(mesh, models)
    missing = padded_length(tokens.shape[1], bucket) - tokens.shape[1]
    padded: Any = np.pad(tokens, ((0, 0), (0, missing)))
    return Request(
        keys=key,
        method=method,
        target=models[0],
        draft=models[1],
        prompts=Sequences(tokens=padded, lengths=lengths),
        limits=lengths + np.int32(max_new_tokens),
        room=-(-max_new_tokens // BUCKET) * BUCKET,
        policy=for_rows(policy, len(tokens)),
        draft_policy=for_rows(draft_policy, len(tokens)),
        observe=observe,
        mesh=mesh,
        logprobs=logprobs,
        stop=stopping.prepared(stop, tokenizer, models[0].vocab_size),
    )


def _check_mesh(mesh: Mesh, sequences: int) -> None:
    """Raises `UserError` unless `mesh` comes from `make_mesh` and divides the sequences."""
    hint = "give one from `sharding.make_mesh`"
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh={mesh!r}: must be a mesh or None; {hint}")
    if mesh.axis_names != sharding.AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise UserError(f"mesh: has axes {mesh.axis_names} of types {mesh.axis_types}; {hint}")
    if sequences % mesh.size:
        raise UserError(f"mesh: {sequences} prompts for {mesh.size} devices; give a multiple")


def padded_length(tokens: int, bucket: int = BUCKET) -> int:
    """Returns the padded length of prompts of `tokens` tokens; one program serves many lengths."""
    bucket = bucket if tokens <= LONG else LONG
    return -(-tokens // bucket) * bucket


def sequence_keys(key: PRNGKeyArray | Keys, sequences: int) -> Keys:
    """Returns one key per sequence: `key` itself, or `fold_in(key, i)` if it is a single key."""
    if key.ndim:
        return key
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, np.arange(sequences))
