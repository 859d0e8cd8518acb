"""Checks that tables are what their JSON gives, and that figures on the pages are those of the tables that they link to.

    python scripts/dev/check_figures.py

Looked at are numbers with a decimal point or with a comma between thousands. On a page, those of a paragraph, list item or
row of a table that links to tables in results/ must be in one of these, to the decimals that are given; rows without
links take those of the paragraph above. A figure that no table has belongs in `BY_HAND`. Rows of a table must be those that
its program makes of its JSON today, or hold figures of the JSON alone, where the program has changed since. Prints what has
drifted; exit status 2 if anything has.
"""

import json
import pathlib
import re
import runpy
from collections.abc import Iterable, Iterator
from typing import Any

from absl import flags

from spectr_jax import cli
from spectr_jax.errors import UserError
from spectr_jax.experiments import auto, latency, quality, spec_bench, tokens_per_call, trees

SCRIPTS = pathlib.Path(__file__).resolve().parent
ROOT = SCRIPTS.parents[1]
RESULTS = ROOT / "results"
FIGURE = re.compile(r"(?<![\w./-])(\d[\d,]*\.\d+|\d{1,3}(?:,\d{3})+)(?!\w)")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
MAKERS = {
    "compiled/calls/h100": "compile_for",
    "layer/6m/verifiers": "compare_verifiers",
    "layer/verifiers": "compare_verifiers",
    "layer/trees": "compare_trees",
    "layer/greedy/trees": "compare_trees",
    "layer/greedy/drafts_0.4/trees": "compare_trees",
    "layer/greedy/drafts_1.0/trees": "compare_trees",
    "layer/optimum": "compare_optimum",
    "layer/dynamic": "compare_dynamic",
    "smollm2/architectures": "compare_architectures",
    "smollm2/drafts/int8/drafts": "compare_drafts",
    "smollm2/drafts/int8_8/drafts": "compare_drafts",
    "smollm2/losses": "compare_losses",
    "smollm2/trees/trees": "compare_trees",
    "smollm2/eagle/outputs": "check_outputs",
    "smollm2/outputs": "check_outputs",
    "training/training": "bench_train",
}
"""Tables that a script of this folder makes, by its function `markdown`; `EXPERIMENTS` make those of their names."""
EXPERIMENTS = {each.NAME: each for each in (auto, latency, quality, spec_bench, tokens_per_call, trees)}
OLDER = ("auto/auto", "compiled/h100", "compiled/v5e")
"""Tables whose program has changed since, with figures that their JSON does not have as such."""
BY_HAND: dict[str, tuple[str, ...]] = {
    "README.md": ("K-SEQ is 8 to 12 % below",),  # A ratio.
    "docs/drafts.md": (
        *("on 1.6 M tokens", "on 1.6 M labelled tokens", "0.84 to 0.97 x", "deviations of 0.00 to 0.17"),
        "1.34 times",  # A median of ratios.
    ),
    "docs/otm_layer.md": ("V = 8,192", "5.3 ms on (8, 8), 3.8 ms with 16 competitions"),  # It says so.
    "docs/speed.md": (
        "2.5 times the size of the draft",
        "perplexity to 0.0001 %; in int8 the perplexity is 0.16 % higher, in llama.cpp's own 8 bits 0.38 %",  # Ratios.
        "costs the embedded models 0.03 to 0.06 %",  # Ratios.
    ),
    "docs/training.md": ("reads 0.5 M tokens a second", "with Python 3.12 or later", "the last for Python 3.11"),
}
"""What the pages say beside a table that no table has: sizes, ratios of its figures, and what was timed by hand."""


def table_files() -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """Each table: its Markdown, and the JSON beside it."""
    for path in sorted(RESULTS.rglob("*.json")):
        if path.with_suffix(".md").exists():
            yield path.with_suffix(".md"), path


def drifted_rows(path: pathlib.Path, text: str, result: dict[str, Any]) -> list[str]:
    """The rows of a table, the Markdown `text`, that its JSON `result` does not give."""
    name = str(path.relative_to(RESULTS).with_suffix(""))
    if name in OLDER or _made(name, result) == _rows(text):
        return []
    lists = [each for each in result.values() if isinstance(each, list) and each and isinstance(each[0], dict)]
    drifted = []
    for table in _tables(text):
        aligned: list[Any] = next((each for each in lists if len(each) == len(table)), [result] * len(table))
        for row, source in zip(table, aligned, strict=True):
            known = [value * unit for value in _numbers(source) for unit in (1, 100, 1000)]
            drifted += [f"{figure} in {row}" for figure in FIGURE.findall(row) if not _is_among(figure, known)]
    return drifted


def drifted_citations(page: pathlib.Path, text: str) -> list[str]:
    """Figures of a page, the Markdown `text`, that are not in the tables that stand beside them."""
    drifted, by_hand, tables = [], BY_HAND.get(str(page.relative_to(ROOT)), ()), []
    for block in _blocks(text):
        links = [(page.parent / link).resolve() for link in LINK.findall(block) if "://" not in link]
        results = [link for link in links if RESULTS in link.parents]
        if results or not block.startswith("|"):  # Rows without links belong to what stands above their table.
            tables = [link for link in results if link.suffix == ".md" and link.exists()]
        if not tables:
            continue
        known = [float(each.replace(",", "")) for table in tables for each in FIGURE.findall(table.read_text())]
        words = LINK.sub("]", block)
        for fragment in by_hand:
            words = words.replace(fragment, "")
        drifted += [f"{figure} in {block}" for figure in FIGURE.findall(words) if not _is_among(figure, known)]
    return drifted


def pages() -> list[pathlib.Path]:
    """The pages whose figures are checked."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), RESULTS / "README.md"]


def _made(name: str, result: dict[str, Any]) -> list[str] | None:
    """The rows that a table's program makes of its JSON; None if no program does, or not of what its older self left."""
    experiment, kept = EXPERIMENTS.get(name.rpartition("/")[2]), _forgotten_flags()
    try:
        if name in MAKERS:
            script = runpy.run_path(str(SCRIPTS / f"{MAKERS[name]}.py"), run_name="checked")
            flags.FLAGS.mark_as_parsed()
            return _rows(script["markdown"](result))
        return _rows(experiment.markdown(result)) if experiment else None
    except KeyError:
        return None
    finally:
        _forgotten_flags()
        for each, flag in kept.items():
            flags.FLAGS[each] = flag


def _forgotten_flags() -> dict[str, flags.Flag]:
    """Removes all flags but absl's own, of which a script may have some of the same names, and returns them."""
    found = {}
    for name in list(flags.FLAGS):
        if not flags.FLAGS.find_module_defining_flag(name, "").startswith("absl"):
            found[name] = flags.FLAGS[name]
            delattr(flags.FLAGS, name)
    return found


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def _tables(text: str) -> Iterator[list[str]]:
    """The rows of each table, without those of its head."""
    table: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line)
        elif table:
            yield table[2:]
            table = []


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs, list items and rows of tables, a line each; no code."""
    lines: list[str] = []
    for line in [*re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines(), ""]:
        ends = not line.strip() or line.startswith(("    ", "|", "- ", "#"))
        if ends and lines:
            yield " ".join(lines)
            lines = []
        if line.strip() and not line.startswith("    "):
            lines.append(line.strip())


def _numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON value."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def _is_among(figure: str, known: Iterable[float]) -> bool:
    """Whether one of the numbers is the figure, to the decimals that it has."""
    half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
    stated = float(figure.replace(",", ""))
    return any(abs(stated - number) <= half + 1e-9 for number in known)


def main():
    drifted = []
    for table, source in table_files():
        found = drifted_rows(table, table.read_text(), json.loads(source.read_text()))
        drifted += [f"{table.relative_to(ROOT)}: {each}" for each in found]
    for page in pages():
        drifted += [f"{page.relative_to(ROOT)}: {each}" for each in drifted_citations(page, page.read_text())]
    for line in drifted:
        print(line)
    if drifted:
        raise UserError(f"{len(drifted)} figures have drifted; mend the pages, or make the tables anew")


if __name__ == "__main__":
    cli.run(main)
