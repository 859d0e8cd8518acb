"""Tests that the Colab notebook fits the repository, without running it.

`scripts/dev/run_notebook.py --smoke` runs it.
"""

import ast
import json
import re

import pytest

from helpers import ROOT, names_in

CELLS = json.loads((ROOT / "scripts/spectr_colab.ipynb").read_text())["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS]
CODE = [source for cell, source in zip(CELLS, SOURCES, strict=True) if cell["cell_type"] == "code"]
WITH_FIELDS = [index for index, source in enumerate(SOURCES) if "--config." in source]
WITH_COMMANDS = [index for index, source in enumerate(SOURCES) if "python -m spectr_jax." in source]


def test_the_notebook_is_saved_without_outputs():
    for cell in CELLS:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, "".join(
                cell["source"]
            )


def test_code_cells_are_valid_python():
    for source in CODE:
        ast.parse(source)


def test_one_parameter_switches_to_a_smoke_run():
    assert (
        sum(source.count("\nSMOKE = False  # @param") for source in CODE) == 1
        and "\nSMOKE = " in CODE[0]
    )


def test_the_colab_badge_opens_this_notebook():
    badge = "https://colab.research.google.com/assets/colab-badge.svg"
    page = "https://colab.research.google.com/github/spectr-jax/spectr_jax/blob/main/scripts/spectr_colab.ipynb"
    assert f"({badge})]({page})" in SOURCES[0]
    assert 'REPOSITORY = "https://github.com/spectr-jax/spectr_jax"' in CODE[0]


def _flags_of(module: str) -> set[str]:
    """Returns the flags that the source of an entry point defines."""
    path = ROOT / f"spectr_jax/{module}.py"
    source = (path if path.exists() else path.with_suffix("") / "__main__.py").read_text()
    return set(re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", source))


@pytest.mark.parametrize("index", WITH_COMMANDS, ids="cell {}".format)
def test_commands_in_a_cell_use_defined_flags(index):
    source = SOURCES[index]
    modules = set(re.findall(r"python -m spectr_jax\.(\w+)", source))
    known = set().union(*map(_flags_of, modules))
    other_programs = {"depth", "quiet"}  # Flags of git and pip.
    named = set(re.findall(r"[\s`\"']--(\w+)(?=[\s`\"'=.])", source)) - other_programs
    assert named and named <= known, named - known


@pytest.mark.parametrize("index", WITH_FIELDS, ids="cell {}".format)
def test_commands_set_existing_config_fields(index):
    files = re.findall(r"--config=(configs/[\w/]+\.py)", SOURCES[index])
    configs = [names_in(file).get_config() for file in files]
    for field in re.findall(r"--config\.([\w.]+)=", SOURCES[index]):
        assert any(_has(config, field) for config in configs), field


def _has(config, field: str) -> bool:
    for part in field.split("."):
        if part not in config:
            return False
        config = config[part]
    return True
