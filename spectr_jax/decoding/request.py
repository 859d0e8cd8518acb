"""The arguments of `generate` and `stream`: checks and padding before anything runs."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jaxtyping import PRNGKeyArray

from spectr_jax.decoding import checks, stopping
from spectr_jax.decoding.loop import Call
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, check_policy, for_rows
from spectr_jax.decoding.tree import Keys
from spectr_jax.models.base import Model
from spectr_jax.models.frozen import Frozen, Trained, freeze
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError

AnyModel: TypeAlias = Model | Frozen | Trained
Observe: TypeAlias = Callable[[Call], Any]

BUCKET = 16
"""The padded length of prompts is a multiple of this."""

LONG = 256
"""Prompts of `stream`, and prompts longer than this, are padded to a multiple of this."""

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of `generate`; after `checked`, a pytree that passes through `jax.jit`."""

    key: Any
    method: Method = dataclasses.field(metadata=STATIC)
    target: Any
    draft: Any
    prompts: Any
    prompt_lengths: Any
    max_new_tokens: int = dataclasses.field(metadata=STATIC)
    policy: Any = None
    observe: Observe | None = dataclasses.field(default=None, metadata=STATIC)
    mesh: Mesh | None = dataclasses.field(default=None, metadata=STATIC)
    draft_policy: Any = None
    logprobs: bool = dataclasses.field(default=False, metadata=STATIC)
    stop: Any = None


def checked(request: Request, bucket: int) -> Request:
    """Returns the request with frozen models, both policies, and padded prompts.

    Raises:
      UserError: as in `generate`.
    """
    method, observe, mesh = request.method, request.observe, request.mesh
    policy = Policy() if request.policy is None else request.policy
    draft_policy = policy if request.draft_policy is None else request.draft_policy
    checks.check_method(method)
    if not isinstance(observe, Hashable) or not (observe is None or callable(observe)):
        raise UserError(f"observe={observe!r}: must be a hashable function of one Call, or None")
    if not isinstance(request.logprobs, bool):
        raise UserError(f"logprobs={request.logprobs!r}: must be True or False")
    tokens = checks.whole_numbers("prompts", request.prompts)
    lengths = checks.whole_numbers("prompt_lengths", request.prompt_lengths)
    drafts = method.needs_draft and request.draft is not None
    models = freeze(request.target), freeze(request.draft) if drafts else None
    checks.check_request(method, *models, tokens, lengths, request.max_new_tokens)
    checks.check_key(request.key, len(tokens))
    tokenizer = getattr(request.target, "tokenizer", None)
    stop = stopping.prepared(request.stop, tokenizer, models[0].vocab_size)
    check_policy(policy, len(tokens))
    check_policy(draft_policy, len(tokens), "draft_")
    if mesh is not None:
        _check_mesh(mesh, len(tokens))
        models = sharding.replicate(mesh, models)
    missing = padded_length(tokens.shape[1], bucket) - tokens.shape[1]
    return dataclasses.replace(
        request,
        target=models[0],
        draft=models[1],
        prompts=np.pad(tokens, ((0, 0), (0, missing))),
        prompt_lengths=lengths,
        policy=for_rows(policy, len(tokens)),
        draft_policy=for_rows(draft_policy, len(tokens)),
        stop=stop,
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
