"""Tables and charts, with what is needed to make them again."""

import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import jax


def provenance() -> dict[str, Any]:
    """The command, hardware, commit and versions behind a result."""
    device = jax.devices()[0]
    return {
        "command": " ".join(["python", *_program(), *sys.argv[1:]]),
        "hardware": f"{jax.device_count()} x {device.device_kind} ({device.platform}); {_cpu()}, {os.cpu_count()} cores",
        "commit": _git("rev-parse", "HEAD") + ("-dirty" if _git("status", "--porcelain") else ""),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """An aligned Markdown table; all columns but the first are right-aligned."""
    widths = [max(3, *(len(row[column]) for row in [header, *rows])) for column in range(len(header))]

    def line(cells):
        padded = [cells[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join([line(header), line(rule), *map(line, rows)])


def _program() -> list[str]:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec else [sys.argv[0]]


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    try:
        root = pathlib.Path(__file__).parent
        result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=20)
        return result.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown" if arguments[0] == "rev-parse" else ""
