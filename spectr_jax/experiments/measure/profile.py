"""Profiles a generation with JAX's profiler, by phase of a call and kind of operation."""

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
"""Operations that only contain others and do no work."""
NEW_TOKENS = 32
"""Generated tokens, or fewer if a model's context is too short."""


def generation_profile(
    method: Method, target: Model, draft: Model, context: int
) -> list[dict[str, Any]]:
    """Returns the time inside operations while one sequence is generated, as the rows of
    `summary`.

    There are no rows if the machine does not allow profiling, as on some virtual GPUs.

    Args:
      method: the method to decode with, at temperature 1.
      target, draft: as for `freeze`.
      context: number of random tokens of the prompt.
    """
    max_new_tokens = min(NEW_TOKENS, target.context - context, draft.context - context)
    prompt = np.random.default_rng(0).integers(0, target.vocab_size, (1, context))
    arguments: Any = (jax.random.key(0), method, target, draft, prompt, [context], max_new_tokens)
    jax.block_until_ready(generate(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            generation = jax.block_until_ready(generate(*arguments))
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        times = operation_times(jax.profiler.ProfileData.from_file(str(files[-1]))) if files else {}
    program = lower(*arguments).compile().as_text() or ""
    return summary(times, scopes(program), int(generation.target_calls[0]))


def operation_times(data: Any) -> dict[str, tuple[int, float]]:
    """Returns how often each operation ran, and its total seconds, over all threads or streams.

    `data` is a `jax.profiler.ProfileData`.
    """
    found: dict[str, list[float]] = collections.defaultdict(list)
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation and _kind(str(operation)) not in _CONTROL:
                    found[str(operation)].append(event.duration_ns * 1e-9)
    return {operation: (len(seconds), sum(seconds)) for operation, seconds in found.items()}


def scopes(program: str) -> dict[str, str]:
    """Returns the phase (`jax.named_scope`) of each operation of a compiled program, or "other"."""
    found = {}
    for name, scope in re.findall(r'%?([\w.-]+) = [^\n]*?op_name="([^"]*)"', program):
        inside = [part for part in scope.split("/") if part in PHASES]
        found[name] = inside[0] if inside else "other"
    return found


def summary(
    times: dict[str, tuple[int, float]], phases: dict[str, str], calls: int
) -> list[dict[str, Any]]:
    """Returns the times as rows by phase and kind of operation, the longest first.

    Each row has `phase`, `kind`, `operations` per call, `ms` per call, and `share` of the time.
    """
    own_names = {_plain(operation): operation for operation in phases}
    sums: dict[tuple[str, str], list[float]] = {}
    for seen, (number, seconds) in times.items():
        operation = own_names.get(_plain(seen), seen)
        entry = sums.setdefault((phases.get(operation, "other"), _kind(operation)), [0, 0.0])
        entry[0] += number
        entry[1] += seconds
    whole = sum(seconds for _, seconds in sums.values())
    rows: list[dict[str, Any]] = []
    for (phase, kind), (count, seconds) in sums.items():
        per_call = {"operations": count / calls, "ms": seconds / calls * 1e3}
        rows.append({"phase": phase, "kind": kind, **per_call, "share": seconds / whole})
    return sorted(rows, key=lambda row: -row["ms"])


def _plain(operation: str) -> str:
    """Returns an operation's name as a GPU's profile writes it: `fusion_12` for `fusion.12`."""
    return re.sub(r"[.-]", "_", operation)


def _kind(operation: str) -> str:
    """Returns the kind of an operation: `fusion` for `broadcast_add_fusion.39`, `dot` for `dot.7`.

    Operations of XLA's CPU library, mostly matrix products, are `library`.
    """
    if operation.startswith("ynn"):
        return "library"
    name = re.sub(r"([._](clone|\d+))+$", "", operation)
    # A custom call is work, unlike a `call`, which only contains other operations.
    return name.replace("custom_call", "custom-call").split("_")[-1]
