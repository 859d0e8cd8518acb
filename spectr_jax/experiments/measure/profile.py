"""What JAX's profiler sees of a generation, by phase of a call and kind of operation."""

import collections
import pathlib
import re
import tempfile
from typing import Any

import jax
import numpy as np

from spectr_jax.decoding import Method
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.experiments.measure.call_times import PHASES
from spectr_jax.models.base import Model

_CONTROL = ("while", "conditional", "call", "cond")
"""Operations that only contain others."""


def generation_profile(
    method: Method, target: Model, draft: Model | None, context: int, max_new_tokens: int = 32
) -> list[dict[str, Any]]:
    """Returns time inside operations of the generation of one sequence, as rows of phase, kind, operations a call, ms a call
    and share.

    No rows where the machine does not allow profiling, as on some virtual GPUs.

    Args:
      method: to decode with, at temperature 1.
      target: an `nnx.Module` that follows `Model`.
      draft: likewise, or None.
      context: tokens of the prompt, random ones.
      max_new_tokens: of the generation, at most what the contexts of the models have room for.
    """
    max_new_tokens = min(
        [max_new_tokens, *(each.context - context for each in (target, draft) if each is not None)]
    )
    prompt = np.random.default_rng(0).integers(0, target.vocab_size, (1, context))
    arguments: Any = (jax.random.key(0), method, target, draft, prompt, [context], max_new_tokens)
    jax.block_until_ready(generate(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            generation = jax.block_until_ready(generate(*arguments))
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        times = operation_times(jax.profiler.ProfileData.from_file(str(files[-1]))) if files else {}
    return summary(
        times, scopes(lower(*arguments).compile().as_text() or ""), int(generation.target_calls[0])
    )


def operation_times(data: Any) -> dict[str, tuple[int, float]]:
    """Returns how often each operation of a `jax.profiler.ProfileData` ran, and its seconds in all; on every thread or
    stream."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation and _kind(str(operation)) not in _CONTROL:
                    found[str(operation)].append(event.duration_ns * 1e-9)
    return {operation: (len(seconds), sum(seconds)) for operation, seconds in found.items()}


def scopes(program: str) -> dict[str, str]:
    """Returns the phase that each operation of a compiled program belongs to, by its `jax.named_scope`; "other" for none."""
    found = {}
    for name, scope in re.findall(r'%?([\w.-]+) = [^\n]*?op_name="([^"]*)"', program):
        inside = [part for part in scope.split("/") if part in PHASES]
        found[name] = inside[0] if inside else "other"
    return found


def summary(
    times: dict[str, tuple[int, float]], phases: dict[str, str], calls: int
) -> list[dict[str, Any]]:
    """Returns the times by phase and kind, the longest first."""
    own_names = {_plain(operation): operation for operation in phases}
    sums: dict[tuple[str, str], list[float]] = {}
    for seen, (number, seconds) in times.items():
        operation = own_names.get(_plain(seen), seen)
        entry = sums.setdefault((phases.get(operation, "other"), _kind(operation)), [0, 0.0])
        entry[0] += number
        entry[1] += seconds
    whole = sum(seconds for _, seconds in sums.values())
    rows = [
        {
            "phase": phase,
            "kind": kind,
            "operations": number / calls,
            "ms": seconds / calls * 1e3,
            "share": seconds / whole,
        }
        for (phase, kind), (number, seconds) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def _plain(operation: str) -> str:
    """Returns an operation's name as a GPU's profile has it, which writes `loop_fusion_12` for the program's
    `loop_fusion.12`."""
    return re.sub(r"[.-]", "_", operation)


def _kind(operation: str) -> str:
    """Returns `fusion` of `broadcast_add_fusion.39`, `dot` of `dot.7`; `library` of what XLA's CPU library does, products
    mostly."""
    if operation.startswith("ynn"):
        return "library"
    name = re.sub(r"([._](clone|\d+))+$", "", operation)
    return name.replace("custom_call", "custom-call").split("_")[
        -1
    ]  # Which calls no other operation, as `call` does.
