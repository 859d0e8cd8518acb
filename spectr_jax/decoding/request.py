"""The arguments of `generate` and `stream`, checked and padded before anything runs."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jaxtyping import Array, Key, PRNGKeyArray

from spectr_jax.decoding import checks, stopping
from spectr_jax.decoding.loop import Call
from spectr_jax.decoding.methods import Method
from spectr_jax.decoding.policy import Policy, check_policy, for_rows
from spectr_jax.models.base import Model
from spectr_jax.models.frozen import Frozen, Loaded, freeze
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError

AnyModel: TypeAlias = Model | Frozen | Loaded
Observe: TypeAlias = Callable[[Call], Any]

BUCKET = 16
"""Prompts are padded to a multiple of so many tokens."""
LONG = 256
"""Those that are longer than this, and those of `stream`, to a multiple of it."""


class Request(NamedTuple):
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
    logprobs: bool = False
    stop: Any = None


def checked(request: Request) -> Request:
    """Returns the request with its models frozen, and both policies given; raises `UserError` as `generate` does."""
    method, mesh, policy = (
        request.method,
        request.mesh,
        Policy() if request.policy is None else request.policy,
    )
    draft_policy = policy if request.draft_policy is None else request.draft_policy
    checks.check_method(method)
    checks.check_observe(request.observe)
    checks.check_flag("logprobs", request.logprobs)
    tokens = checks.whole_numbers("prompts", request.prompts)
    lengths = checks.whole_numbers("prompt_lengths", request.prompt_lengths)
    drafts = method.needs_draft and request.draft is not None
    models = freeze(request.target), freeze(request.draft) if drafts else None
    checks.check_request(method, *models, tokens, lengths, request.max_new_tokens)
    checks.check_key(request.key, len(tokens))
    stop = stopping.prepared(
        request.stop, getattr(request.target, "tokenizer", None), models[0].vocab_size
    )
    check_policy(policy, len(tokens))
    check_policy(draft_policy, len(tokens), "draft_")
    if mesh is not None:
        _check_mesh(mesh, len(tokens))
        models = sharding.replicate(mesh, models)
    return request._replace(
        target=models[0],
        draft=models[1],
        prompts=tokens,
        prompt_lengths=lengths,
        policy=for_rows(policy, len(tokens)),
        draft_policy=for_rows(draft_policy, len(tokens)),
        stop=stop,
    )


def _check_mesh(mesh: Mesh, sequences: int) -> None:
    """Raises `UserError` for a mesh with other axes than ours, or over which the sequences do not divide."""
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh={mesh!r}: is not a mesh; give one of `sharding.make_mesh`, or None")
    if mesh.axis_names != sharding.AXES or set(mesh.axis_types) != {AxisType.Auto}:
        raise UserError(
            f"mesh has axes {mesh.axis_names} of {mesh.axis_types}; give one of `sharding.make_mesh`"
        )
    if sequences % mesh.size:
        raise UserError(
            f"{sequences} prompts do not divide over {mesh.size} devices; give a multiple"
        )


def padded(request: Request, bucket: int) -> Request:
    """Returns the request with its prompts padded to a `padded_length`."""
    T = request.prompts.shape[1]
    return request._replace(
        prompts=np.pad(request.prompts, ((0, 0), (0, padded_length(T, bucket) - T)))
    )


def padded_length(tokens: int, bucket: int = BUCKET) -> int:
    """Returns the length that prompts of `tokens` tokens are padded to, so that one program serves many lengths."""
    bucket = bucket if tokens <= LONG else LONG
    return -(-tokens // bucket) * bucket


def sequence_keys(key: PRNGKeyArray | Key[Array, " batch"], sequences: int) -> Key[Array, " batch"]:
    """Returns a key for each sequence."""
    return (
        jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, np.arange(sequences))
        if key.ndim == 0
        else key
    )
