"""Figures on the pages are those of their tables, and tables are what their JSON gives (`scripts/dev/check_figures.py`)."""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def check():
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "scripts/dev"))
        import check_figures

        yield check_figures
    del sys.modules["check_figures"]


def test_all_are(check):
    for page in check.pages():
        assert not check.drifted_citations(page, page.read_text()), page
    for table, source in check.table_files():
        assert not check.drifted_rows(table, table.read_text(), json.loads(source.read_text())), table


def _with_another_digit(text, figure):
    """Its last digit is another."""
    return text.replace(figure, figure[:-1] + str((int(figure[-1]) + 5) % 10), 1)


@pytest.mark.slow
def test_another_digit_is_noticed(check):
    page = ROOT / "docs/which_method.md"
    row = next(line for line in page.read_text().splitlines() if "`otm_layer`" in line and line.count("results/") == 1)
    figure = check.FIGURE.findall(check.LINK.sub("]", row))[0]
    drifted = check.drifted_citations(page, _with_another_digit(row, figure))
    assert len(drifted) == 1 and row[:20] in drifted[0]
    noticed = []
    for table, source in check.table_files():
        lines = [line for line in table.read_text().splitlines() if line.startswith("|") and check.FIGURE.search(line)]
        figure = check.FIGURE.findall(lines[-1])[0]
        changed = table.read_text().replace(lines[-1], _with_another_digit(lines[-1], figure))
        if check.drifted_rows(table, changed, json.loads(source.read_text())):
            noticed.append(str(table.relative_to(check.RESULTS).with_suffix("")))
    made = {*check.MAKERS, "ladder/tokens_per_call", "trees/trees", "smollm2/quality"}
    assert made - {*check.OLDER} <= {*noticed}
