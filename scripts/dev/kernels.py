"""Counts the kernels, host stops and collectives of a compiled program, from its optimized HLO.

They decide the time of a call on a GPU. A kernel takes about 3 microseconds to launch, whatever it
computes. At a conditional, and in a loop of unknown length, the host waits for the device. At a
collective, devices wait for each other.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "domain"}
FREE |= {"opt-barrier", "partition-id", "replica-id"}
COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"}
FREE |= {f"{kind}-done" for kind in ("copy", "async", "fusion", *COLLECTIVES)}
"""Operations that launch no kernel."""


class Collective(NamedTuple):
    """A collective operation: its kind, the bytes of its result on a device, and its source."""

    phase: str
    kind: str
    bytes: int
    source: str


class Counts(NamedTuple):
    """The counts of one execution, by phase.

    Attributes:
      kernels: launched kernels. A conditional counts as its longer branch, and a loop of unknown
        length as one iteration.
      stops: conditionals and loops of unknown length.
      collectives: executed collectives, each with its number.
    """

    kernels: Counter[str]
    stops: Counter[str]
    collectives: Counter[Collective]

    @classmethod
    def none(cls) -> "Counts":
        return cls(Counter(), Counter(), Counter())

    def add(self, other: "Counts", times: int = 1) -> None:
        """Adds the counts of `other`, multiplied by `times`."""
        for mine, theirs in zip(self, other, strict=True):
            mine.update({counted: times * number for counted, number in theirs.items()})


@dataclasses.dataclass(frozen=True)
class _Operation:
    kind: str
    line: str
    shape: str

    @property
    def bytes(self) -> int:
        """Returns the size of the result."""
        arrays = re.findall(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", self.shape)
        return sum(
            math.prod(map(int, filter(None, sizes.split(",")))) * int(bits or 8) // 8
            for _, bits, sizes in arrays
        )

    @property
    def calls(self) -> list[str]:
        """Returns the names of the computations that it runs: the condition and the body of a loop,
        the branches of a conditional, or the callee of a call."""
        names = "body|condition|to_apply|calls|true_computation|false_computation"
        single = re.findall(rf"(?:{names})=%?([\w.-]+)", self.line)
        several = re.search(r"branch_computations=\{([^}]*)\}", self.line)
        return single + (re.findall(r"%?([\w.-]+)", several[1]) if several else [])


def count(hlo: str, phases: tuple[str, ...]) -> Counts:
    """Returns the counts of one iteration of the outermost loop of unknown length; 0 without one.

    Args:
      hlo: `compiled.as_text()`.
      phases: names of `jax.named_scope`s in the loop. The phase "" has what is in none of them.
    """
    computations = dict(_computations(hlo))
    entry = next(name for name in computations if name.startswith("ENTRY"))
    operations = [each for name in _reached(computations, entry) for each in computations[name]]
    bodies = [
        each.calls[1]
        for each in operations
        if each.kind == "while" and _trips(computations, each) is None
    ]
    counts = [_count(computations, body, phases) for body in bodies]
    # Prompts run in a loop of their own, which is outside all phases.
    return max(
        counts,
        key=lambda each: (each.kernels.total() - each.kernels[""], each.kernels.total()),
        default=Counts.none(),
    )


def _computations(hlo: str) -> Iterator[tuple[str, list[_Operation]]]:
    for block in re.split(r"\n\n+", hlo):
        head, _, body = block.partition("{\n")
        named = re.match(r"(ENTRY )?%?([\w.-]+)", head.splitlines()[-1] if head else "")
        if named and body:
            operations = [
                _Operation(found[2], line, found[1])
                for line in body.splitlines()
                if (found := re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?[\])}]) ([\w-]+)\(", line))
            ]
            yield (named[1] or "") + named[2], operations


def _reached(computations: dict[str, list[_Operation]], name: str) -> Iterator[str]:
    """Yields the computation `name` and all that it calls, without the bodies of loops."""
    yield name
    for each in computations[name]:
        if each.kind == "call":
            for callee in each.calls:
                yield from _reached(computations, callee)


def _count(computations: dict[str, list[_Operation]], name: str, phases: tuple[str, ...]) -> Counts:
    total = Counts.none()
    for each in computations[name]:
        total.collectives.update(_collectives(computations, each, phases))
        if each.kind in FREE:
            continue
        phase = _phase(each.line, phases)
        if each.kind not in ("call", "while", "conditional"):
            total.kernels[phase] += 1
            continue
        called = [_count(computations, callee, phases) for callee in each.calls]
        if each.kind == "conditional":
            called = [max(called, key=lambda branch: branch.kernels.total())]
        trips = _trips(computations, each)
        for counts in called:
            total.add(counts, trips or 1)
        if each.kind != "call" and trips is None:
            total.stops[phase] += 1
    return total


def _trips(computations: dict[str, list[_Operation]], each: _Operation) -> int | None:
    """Returns the number of iterations of a loop, or None if it is unknown.

    Compilers for TPUs leave only a condition that compares a counter with a constant.
    """
    if each.kind != "while":
        return None
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', each.line):
        return int(known[1])
    condition = computations[each.calls[0]]
    lines = "".join(step.line for step in condition)
    bounds = re.findall(r" constant\((\d+)\)", lines)
    simple = {step.kind for step in condition} <= FREE | {"compare"} and "direction=LT" in lines
    return int(bounds[0]) if simple and len(bounds) == 1 else None


def _collectives(
    computations: dict[str, list[_Operation]], each: _Operation, phases: tuple[str, ...]
) -> Iterator[Collective]:
    """Yields the collective that an operation is, ends or, as a fusion or asynchronously, runs."""
    kind = each.kind.removesuffix("-done")
    if kind in COLLECTIVES:
        yield Collective(_phase(each.line, phases), kind, each.bytes, _source(each.line))
    elif each.kind in ("fusion", "async-start"):
        for inner in itertools.chain(*(computations.get(callee, []) for callee in each.calls)):
            yield from _collectives(computations, inner, phases)


def _source(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    return name[1] if name else ""


def _phase(line: str, phases: tuple[str, ...]) -> str:
    parts = re.split(r"[/()]", _source(line))
    return next((part for part in parts if part in phases), "")
