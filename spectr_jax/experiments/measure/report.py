"""Writes tables with their provenance: command, config, hardware and commit."""

import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spectr_jax.loading.by_name import Trained
from spectr_jax.models import frozen
from spectr_jax.utils.files import write_json, write_whole


def weights(*models: Trained) -> list[str]:
    """Returns the name of each model and the digest of its weights (`frozen.digest`)."""
    return [f"{model.name} {frozen.digest(model)}" for model in models]


def provenance_line(result: dict[str, Any]) -> str:
    """Returns the last sentence of a table's notes, from the fields of `provenance` and, if it has
    them, of `Journal.about`."""
    config = f"config {result['config_hash']}, " if "config_hash" in result else ""
    seconds = f" in {result['seconds']:.0f} s" if "seconds" in result else ""
    commits = [
        re.sub(r"^(\w{12})\w*", r"\1", commit)
        for commit in result.get("commits", [result["commit"]])
    ]
    at = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"
    versions = f"{config}{at}, jax {result['jax']}"
    return f"Made by `{result['command']}` ({versions}) on {result['hardware']}{seconds}."


def mean_and_std(values: Sequence[float]) -> str:
    """Returns mean and standard deviation over seeds; only the mean of a single value."""
    mean = f"{np.mean(values):.2f}"
    return f"{mean} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else mean


def temperatures(config: dict[str, Any]) -> str:
    """Returns a description of the temperatures of a config's target and drafts."""
    of_drafts = config.get("draft_temperature")
    drafts = "" if of_drafts is None else f" (drafts: {of_drafts})"
    return f"temperature {config['temperature']}{drafts}"


def decoded(result: dict[str, Any]) -> str:
    """Returns the sentence about the prompts and the sampling of a table."""
    config, seeds = result["config"], tuple(result["config"]["seeds"])
    several = f"mean ± standard deviation over {len(seeds)} seeds {seeds}"
    return (
        f"{result['prompts']} prompts of up to {config['prompt_tokens']} tokens, up to "
        f"{config['max_new_tokens']} new tokens each, batch {config['batch_size']}, "
        f"{config['dtype']}, {temperatures(config)}; "
        f"{several if len(seeds) > 1 else f'seed {seeds[0]}'}."
    )


def page(title: str, table: str, notes: Sequence[str]) -> str:
    """Returns a page of Markdown: a title, a table (below the answer, if there is one), and
    paragraphs."""
    return "\n\n".join([f"# {title}", table, *notes]) + "\n"


def write(workdir: pathlib.Path, name: str, result: dict[str, Any], text: str) -> None:
    """Writes a table as NAME.json, and its Markdown `text` as NAME.md; prints the text."""
    workdir.mkdir(parents=True, exist_ok=True)
    write_whole(workdir / f"{name}.md", text)
    write_json(workdir / f"{name}.json", result)
    print(text)


def provenance() -> dict[str, Any]:
    """Returns the command, hardware, commit and versions that produce a result."""
    device = jax.devices()[0]
    devices = f"{jax.device_count()} x {device.device_kind} ({device.platform})"
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", module.name] if module else sys.argv[:1]
    return {
        "command": shlex.join(["python", *program, *sys.argv[1:]]),
        "hardware": f"{devices}; {_cpu()}, {os.cpu_count()} cores",
        "commit": _git("rev-parse", "HEAD") + ("-dirty" if _git("status", "--porcelain") else ""),
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


Columns = dict[str, Callable[[Mapping[str, Any]], object]]
"""The columns of a table: each header, and a function that returns the cell of a row."""


def table(columns: Columns, rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the Markdown table of `rows`."""
    return markdown_table(list(columns), [[cell(row) for cell in columns.values()] for row in rows])


def number(value: float | None, form: str) -> str:
    """Returns a number in a format such as ".2f", and "-" for None."""
    return "-" if value is None else format(value, form)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns an aligned Markdown table; all columns but the first are right-aligned. Bars and line
    breaks in cells are escaped."""
    titles, *texts = [
        [" ".join(str(cell).replace("|", r"\|").splitlines()) for cell in row]
        for row in (header, *rows)
    ]
    columns = zip(titles, *texts, strict=True)
    widths = [max(3, *map(len, column)) for column in columns]

    def line(cells):
        numbers = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "| " + " | ".join([cells[0].ljust(widths[0]), *numbers]) + " |"

    rule = ["-" * widths[0]] + ["-" * (width - 1) + ":" for width in widths[1:]]
    return "\n".join([line(titles), line(rule), *map(line, texts)])


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    try:
        root = pathlib.Path(__file__).parent
        result = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=20
        )
        return result.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("SPECTR_JAX_COMMIT", "unknown") if arguments[0] == "rev-parse" else ""
