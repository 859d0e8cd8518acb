"""Counts what decoding of large targets needs on accelerators that this machine does not have.

    python scripts/dev/compile_large.py --device=h100 [--only='8B, .*, 8 sequences, 8 devices']

Install the device's compiler as for compile_for.py. There are no weights, nothing runs, and kernels
are not tuned. Each program is compiled with 2 and with 4 layers of both models, and its counts are
extrapolated to all layers; --full also compiles all layers, as a check. `--only` is a regular
expression for names of programs. The same command resumes, and recompiles programs of other
commits. Writes DEVICE-large.md and DEVICE-large.json.
"""

import pathlib
import re
from collections import Counter
from typing import Any
from unittest import mock

import jax
from absl import flags
from ahead_of_time import DEVICES, accelerators, compiled
from large_predictions import CARDS, call_seconds
from large_programs import Program, cache_bytes, lowered, programs, weight_bytes

from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.call_times import PHASES
from spectr_jax.utils import cli
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import read_json, write_json

_WORKDIR = flags.DEFINE_string("workdir", "runs/compiled", "Where the table goes.")
_DEVICE = flags.DEFINE_string("device", "h100", "h100 or v5e.")
_ONLY = flags.DEFINE_string("only", "", "Regular expression: compile programs with such names.")
_FULL = flags.DEFINE_bool("full", False, "Also compile all layers, to check the extrapolation.")

FEW, MORE = 2, 4
"""Numbers of layers that are compiled."""


def sizes(program: Program) -> dict[str, Any]:
    """Returns the bytes of a program's weights and caches on one device, and of all its logits."""
    configs, tree = program.configs(), program.decoder().tree
    nodes = tree.size + 1 + (len(tree.inner) if len(configs) > 1 else 0)
    return {
        "weights_bytes": sum(weight_bytes(config, program.dtype) for config in configs),
        "caches_bytes": sum(cache_bytes(config, program) for config in configs),
        "logits_bytes": program.sequences * nodes * configs[0].vocab_size * 4,
    }


def measured(program: Program, places: list[jax.Device]) -> dict[str, Any]:
    """Returns the row of a program: its sizes, and the counts of a call with all layers."""
    row = {"program": program.name, **sizes(program)}
    if row["weights_bytes"] + row["caches_bytes"] > CARDS[_DEVICE.value].memory:
        return row
    layers = [FEW, MORE] if not _FULL.value else [FEW, MORE, 0]
    parts = [program._replace(layers=number or None) for number in layers]
    found = [compiled(lambda part=part: lowered(part, places)) for part in parts]
    if errors := [each["error"] for each in found if "error" in each]:
        return row | {"error": errors[0]}
    few, more = found[:2]
    growth = more["temporary_bytes"] - few["temporary_bytes"]
    caches = [sizes(part)["caches_bytes"] for part in parts[:2]]
    return row | {
        "other_bytes": few["temporary_bytes"] - caches[0],
        "cache_growth": growth / (caches[1] - caches[0]),
        "kernels": extrapolated(program, few["kernels"], more["kernels"]),
        "stops": few["stops"],
        "collectives": [
            {"phase": phase, "kind": kind, "number": number, "bytes": summed}
            for (phase, kind), (number, summed) in collectives(program, few, more).items()
        ],
        "largest": sorted(few["collectives"], key=lambda each: -each["bytes"])[:8],
        "seconds": sum(each["lowering_seconds"] + each["compilation_seconds"] for each in found),
        "full": found[2] if _FULL.value else None,
    }


def extrapolated(program: Program, few: dict, more: dict) -> dict[str, float]:
    """Returns counts by phase with all layers, from those with `FEW` and `MORE` layers.

    Only layers of the draft run in the phase `draft`, and of the target in `score`. In `commit`, a
    layer of either model has the same operations. Kernels that the compiler adds are outside all
    phases, and most of them are for the draft, which runs several times.
    """
    depths = [config.layers for config in program.configs()]
    of_phase = {"draft": depths[-1], "score": depths[0], "select": FEW, "": depths[-1]}
    of_phase["commit"] = sum(depths) / len(depths)
    return {
        phase: few.get(phase, 0)
        + (more.get(phase, 0) - few.get(phase, 0)) * (of_phase[phase] - FEW) / (MORE - FEW)
        for phase in (*PHASES, "")
    }


def collectives(program: Program, few: dict, more: dict) -> dict[tuple[str, str], list[float]]:
    """Returns the number and the bytes of collectives with all layers, by phase and kind."""
    numbers, summed = [
        [_by_kind(row["collectives"], field) for row in (few, more)] for field in ("one", "bytes")
    ]
    kinds = {kind for _, kind in numbers[1]}
    found = {}
    for kind in sorted(kinds):
        for phase in (*PHASES, ""):
            both = [
                extrapolated(program, *({phase: each[phase, kind]} for each in field))[phase]
                for field in (numbers, summed)
            ]
            if both[0]:
                found[phase, kind] = both
    return found


def _by_kind(rows: list[dict[str, Any]], field: str) -> Counter[tuple[str, str]]:
    total: Counter[tuple[str, str]] = Counter()
    for row in rows:
        total[row["phase"], row["kind"]] += row["number"] * row.get(field, 1)
    return total


def select_cells(row: dict[str, Any]) -> list[str]:
    """Returns number and megabytes of all collectives, then of those that select."""
    cells = []
    for phases in ((*PHASES, ""), ("select",)):
        chosen = [each for each in row["collectives"] if each["phase"] in phases]
        cells.append(f"{sum(each['number'] for each in chosen):.0f}")
        cells.append(f"{sum(each['bytes'] for each in chosen) / 1e6:.1f}")
    return cells


def cells(row: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    """Returns the cells of a program's line; `base` is the row of its baseline."""
    memory = [f"{row[f'{name}_bytes'] / 1e9:.2f}" for name in ("weights", "caches")]
    if "kernels" not in row:
        why = f"fails: {row['error'][:60]}" if "error" in row else "does not fit"
        return [row["program"], *memory, why, *["-"] * 9]
    counts = [f"{row['other_bytes'] / 1e9:.2f}", f"{sum(row['kernels'].values()):.0f}"]
    counts += [str(row["stops"]), *select_cells(row), f"{row['logits_bytes'] / 1e6:.0f}"]
    gain = row["call_seconds"] / base["call_seconds"] if base and "kernels" in base else 0
    counts += [f"{row['call_seconds'] * 1e3:.2f}", f"{gain:.2f}" if gain else "-"]
    return [row["program"], *memory, *counts]


HEADER = ["Program", "Weights, GB", "Caches, GB", "Other, GB", "Kernels/call", "Host stops/call"]
HEADER += ["Collectives/call", "MB", "Collectives of select", "MB", "All logits, MB"]
HEADER += ["Predicted ms/call", "Tokens/call to gain"]


def markdown(result: dict[str, Any]) -> str:
    """Returns the page with the table, the assumptions and the provenance."""
    rows = {row["program"]: row for row in result["rows"]}
    known = {program.name: program for program in programs(result["name"])}
    lines = []
    for name, row in rows.items():
        base = known[name]._replace(method="baseline", options=()).name
        lines.append(cells(row, rows.get(base)))
    return report.page(
        f"Large targets, compiled for {result['device']}, without one",
        report.markdown_table(HEADER, lines),
        [
            *NOTES,
            CARDS[result["name"]].note,
            *checks(result["rows"]),
            report.provenance_line(result),
        ],
    )


NOTES = [
    "A program is a pair of models, a method, a number of sequences, and a number of devices that "
    "share one copy of the models. 8B is Llama-3.1-8B with Llama-3.2-1B as its draft, 32B is "
    "Qwen3-32B with Qwen3-0.6B, and 27B has the sizes of Gemma-3-27B with Gemma-3-1B in the form of "
    "the Llama family. Weights are bfloat16 unless the row names another precision. Prompts have "
    "512 tokens unless the row names another length, and continuations up to 64.",
    "Memory, collectives and bytes are those of one device. Weights and caches are computed from "
    "shapes. Other memory is the compiler's temporary memory with 2 layers, less their caches. "
    "Kernels, host stops and collectives are those of one call of the target. They are extrapolated "
    "from programs with 2 and with 4 layers. The bytes of a collective are those of its result. All "
    "logits are those that both models compute in a call, for all sequences, in float32: a gather "
    "of all logits moves that many bytes to each device.",
    "Last column: the tokens per call at which the method is as fast as the baseline, which emits "
    "one token per call.",
]


def checks(rows: list[dict[str, Any]]) -> list[str]:
    """Returns sentences that compare the extrapolation with programs of all layers."""
    found = []
    for row in rows:
        if full := row.get("full"):
            exact = [full["kernels"].get(phase, 0) for phase in (*PHASES, "")]
            guess = [round(row["kernels"][phase]) for phase in (*PHASES, "")]
            memory = row["other_bytes"] + row["caches_bytes"]
            found.append(
                f"All layers of `{row['program']}`: kernels by phase {exact}, extrapolated {guess}; "
                f"temporary memory {full['temporary_bytes'] / 1e9:.2f} GB, computed "
                f"{memory / 1e9:.2f} GB; collectives "
                f"{sum(each['number'] for each in full['collectives'])}, extrapolated "
                f"{sum(each['number'] for each in row['collectives']):.0f}."
            )
    return found


def main() -> None:
    device = _DEVICE.value
    if device not in DEVICES:
        raise unknown("--device", device, DEVICES)
    places, workdir = accelerators(device, 8), pathlib.Path(_WORKDIR.value)
    path, made = workdir / f"{device}-large.json", report.provenance()
    kept = read_json(path)["rows"] if path.exists() else []
    rows = {row["program"]: row for row in kept if row["commit"] == made["commit"]}
    result = {"device": places[0].device_kind, "name": device, **made}
    workdir.mkdir(parents=True, exist_ok=True)
    # Tracing asks for the default backend, and would choose a CPU's program.
    with mock.patch.object(jax, "default_backend", lambda: DEVICES[device][0]):
        for program in programs(device):
            if not re.search(_ONLY.value, program.name) or program.name in rows:
                continue
            row = measured(program, places) | {"commit": made["commit"]}
            if "kernels" in row:
                row["call_seconds"] = call_seconds(program, row, CARDS[device])
            rows[program.name] = row
            print(" | ".join(cells(row, None)), flush=True)
            write_json(path, result | {"rows": list(rows.values())})
    order = [program.name for program in programs(device) if program.name in rows]
    result["rows"] = [rows[name] for name in order]
    report.write(workdir, f"{device}-large", result, markdown(result))
    if failed := [row["program"] for row in result["rows"] if "error" in row]:
        raise UserError(f"{len(failed)} programs fail: {', '.join(failed)}")


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
