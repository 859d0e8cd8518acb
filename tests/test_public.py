"""The public face: what `spectr_jax` exports, what its import costs, the program of its docstring,
what it depends on."""

import ast
import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import spectr_jax
from spectr_jax import decoding
from spectr_jax.utils.errors import EXTRAS

ROOT = pathlib.Path(__file__).parents[1]
PROGRAMS = {
    name: re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    for name, text in (
        ("docstring", spectr_jax.__doc__),
        ("README", (ROOT / "README.md").read_text()),
    )
}
HEAVY = [
    *("orbax", "tensorflow_datasets", "grain", "array_record", "ml_collections", "matplotlib"),
    *("tokenizers", "sentencepiece", "huggingface_hub", "safetensors", "scipy"),
]
"""What neither `import spectr_jax` nor any of its names imports."""


def _imported(program):
    program += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


def test_an_import_waits_for_nothing_that_is_not_used():
    """Not even for JAX; and with all names JAX, Flax and what these bring."""
    assert not _imported("import spectr_jax") & {*HEAVY, "jax", "numpy"}
    names = _imported(
        "from spectr_jax import *\nassert load and generate and check_model and transport"
    )
    assert "jax" in names and not names & set(HEAVY)


def test_an_embedded_model_needs_no_orbax_and_nothing_of_hugging_faces():
    names = _imported("from spectr_jax import load\nload('2m')")
    assert {"safetensors", "sentencepiece"} <= names
    assert not names & (set(HEAVY) - {"safetensors", "sentencepiece"})


def test_the_names():
    assert spectr_jax.__all__ == sorted(spectr_jax.__all__) and set(spectr_jax.__all__) == {
        *("load", "generate", "get_method", "Method", "Policy", "Tree"),
        *("check_plan", "check_method", "check_model", "transport"),
    }
    for name in spectr_jax.__all__:
        assert getattr(spectr_jax, name) is not None and name in dir(spectr_jax)
    assert spectr_jax.transport.get("otm").name == "otm"
    with pytest.raises(AttributeError, match="module 'spectr_jax' has no attribute 'generat'"):
        _ = spectr_jax.generat


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_program(name, capsys):
    """The whole of it, with the 6M for the 20M, which has four times its parameters."""
    program = PROGRAMS[name]
    assert (
        'load("20m", dtype="int8")' in program
        and len([line for line in program.splitlines() if line]) <= 10
    )
    exec(compile(program.replace("20m", "6m"), "program", "exec"), found := {})
    text = capsys.readouterr().out.splitlines()[0]
    assert text.startswith("The committee will meet again next week to") and len(text) > 60
    out, tokenizer = found["out"], found["tokenizer"]
    new = np.asarray(out.tokens)[0, int(found["lengths"][0]) : int(out.lengths[0])]
    assert 0 < len(new) <= 40 and tokenizer.eos not in new[:-1] and tokenizer.bos not in new


def test_decoding_generate_is_the_module_and_spectr_jax_generate_its_function():
    import spectr_jax.decoding.generate as module

    assert module is decoding.generate is sys.modules["spectr_jax.decoding.generate"]
    assert module.generate is spectr_jax.generate and module.Generation is decoding.Generation


def _requirements(lines):
    return sorted(
        line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()
    )


def test_a_missing_module_is_told_with_its_extra():
    """All that the package imports is a dependency, or in the table of errors, which has what
    pyproject.toml has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(lines):
        return {re.match(r"[\w-]+", line)[0].replace("-", "_").lower() for line in lines}

    distributions = importlib.metadata.packages_distributions()

    def comes_with(module):
        return {name.replace("-", "_").lower() for name in distributions[module]}

    brought = {extra: names(project["optional-dependencies"][extra]) for extra in EXTRAS}
    for extra, modules in EXTRAS.items():
        assert all(comes_with(module) & brought[extra] for module in modules)
        assert len(modules) == len(brought[extra])
    imported = set()
    for path in ROOT.glob("spectr_jax/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = (
                    [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else [alias.name for alias in node.names]
                )
                imported |= {module.partition(".")[0] for module in modules}
    others = (
        imported
        - sys.stdlib_module_names
        - {"spectr_jax"}
        - {module for extra in EXTRAS.values() for module in extra}
    )
    assert {"jax", "flax"} <= others
    assert [
        module for module in others if not comes_with(module) & names(project["dependencies"])
    ] == []


def test_dependencies_and_extras_are_the_requirements():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"train", "eval", "hf"}
    declared = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    declared = [line for line in declared if not line.startswith("spectr_jax[")]
    assert _requirements(declared) == _requirements(
        (ROOT / "requirements.txt").read_text().splitlines()
    )
    assert project["urls"]["Repository"] == "https://github.com/spectr-jax/spectr_jax"
