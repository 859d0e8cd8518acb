"""Kernels and host stops of a compiled program, counted in its optimized HLO: what decides the time of a call on a GPU.

A kernel takes about 3 microseconds to launch, whatever it computes. A conditional, and a loop whose end only the device
knows, make the host wait for the device.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

FREE = frozenset(
    {
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "opt-barrier",
        "domain",
    }
    | {"partition-id", "replica-id", "copy-done", "async-done", "fusion-done", "all-reduce-done"}
)
"""Operations that launch nothing."""


class Counts(NamedTuple):
    """Of one execution.

    Attributes:
      kernels: launched, by phase; a conditional counts its longer branch, a loop of unknown length one turn.
      stops: conditionals, and loops whose end only the device knows, by phase.
    """

    kernels: Counter[str]
    stops: Counter[str]

    def plus(self, other: "Counts", times: int = 1) -> "Counts":
        repeated = [
            Counter({phase: times * count for phase, count in each.items()}) for each in other
        ]
        return Counts(self.kernels + repeated[0], self.stops + repeated[1])


@dataclasses.dataclass(frozen=True)
class _Operation:
    kind: str
    line: str

    @property
    def calls(self) -> list[str]:
        """Computations that it runs: those of a loop, the branches of a conditional, or that of a call."""
        single = re.findall(
            r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.-]+)",
            self.line,
        )
        several = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        return single + (re.findall(r"%?([\w.-]+)", several[1]) if several else [])

    @property
    def trips(self) -> int | None:
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', self.line)
        return int(known[1]) if known else None


def count(hlo: str, phases: tuple[str, ...]) -> Counts:
    """Counts one turn of the outermost loop of unknown length; nothing, if there is none.

    Args:
      hlo: of `compiled.as_text()`.
      phases: each is the name of a `jax.named_scope` within the loop; the phase "" is none of them.
    """
    computations = dict(_computations(hlo))
    entry = next(name for name in computations if name.startswith("ENTRY"))
    operations = [each for name in _reached(computations, entry) for each in computations[name]]
    bodies = [each.calls[1] for each in operations if each.kind == "while" and each.trips is None]
    counts = [_count(computations, body, phases) for body in bodies]
    return max(counts, key=lambda each: each.kernels.total(), default=Counts(Counter(), Counter()))


def _computations(hlo: str) -> Iterator[tuple[str, list[_Operation]]]:
    for block in re.split(r"\n\n+", hlo):
        head, _, body = block.partition("{\n")
        named = re.match(r"(ENTRY )?%?([\w.-]+)", head.splitlines()[-1] if head else "")
        if named and body:
            operations = [
                _Operation(found[1], line)
                for line in body.splitlines()
                if (found := re.match(r"\s+(?:ROOT )?%?[\w.-]+ = .*?[\])}] ([\w-]+)\(", line))
            ]
            yield (named[1] or "") + named[2], operations


def _reached(computations: dict[str, list[_Operation]], name: str) -> Iterator[str]:
    """The entry and what it calls, without bodies of loops."""
    yield name
    for each in computations[name]:
        if each.kind == "call":
            for callee in each.calls:
                yield from _reached(computations, callee)


def _count(computations: dict[str, list[_Operation]], name: str, phases: tuple[str, ...]) -> Counts:
    total = Counts(Counter(), Counter())
    for each in computations[name]:
        if each.kind in FREE:
            continue
        phase = _phase(each.line, phases)
        if each.kind == "call":
            total = total.plus(_count(computations, each.calls[0], phases))
        elif each.kind == "while":
            parts = [_count(computations, callee, phases) for callee in each.calls]
            for part in parts:
                total = total.plus(part, each.trips or 1)
            total = total.plus(Counts(Counter(), Counter({phase: each.trips is None})))
        elif each.kind == "conditional":
            branches = [_count(computations, callee, phases) for callee in each.calls]
            total = total.plus(max(branches, key=lambda branch: branch.kernels.total()))
            total = total.plus(Counts(Counter(), Counter({phase: 1})))
        else:
            total = total.plus(Counts(Counter({phase: 1}), Counter()))
    return total


def _phase(line: str, phases: tuple[str, ...]) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    parts = re.split(r"[/()]", name[1]) if name else []
    return next((part for part in parts if part in phases), "")
