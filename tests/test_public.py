"""Tests what `spectr_jax` exports, imports and depends on, and the first examples for users."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import spectr_jax
from helpers import ROOT, names_in
from spectr_jax import decoding
from spectr_jax.models.formats.published import PUBLISHED
from spectr_jax.models.layers import cpu
from spectr_jax.models.weights import weight_files
from spectr_jax.utils.errors import EXTRAS

TEXTS = {"docstring": spectr_jax.__doc__, "README": (ROOT / "README.md").read_text()}
PROGRAMS = {name: re.search(r"```python\n(.*?)```", TEXTS[name], re.DOTALL)[1] for name in TEXTS}
# Neither importing `spectr_jax` nor using one of its exported names imports these.
HEAVY = {
    *("orbax", "tensorflow_datasets", "grain", "array_record", "ml_collections", "matplotlib"),
    *("tokenizers", "sentencepiece", "huggingface_hub", "safetensors", "scipy"),
}


def _imported(program):
    program += "\nimport sys\nprint(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", program]
    return set(subprocess.check_output(command, cwd=ROOT, text=True).split())


def test_importing_the_package_does_not_import_jax():
    assert not _imported("import spectr_jax") & {*HEAVY, "jax", "numpy"}


def test_exported_names_import_jax_but_no_optional_package():
    names = _imported("from spectr_jax import *\nassert load and generate and transport")
    assert "jax" in names and not names & HEAVY


def test_a_published_model_needs_only_safetensors_and_sentencepiece():
    names = _imported("from spectr_jax import load\nload('2m')")
    assert names & HEAVY == {"safetensors", "sentencepiece"}


def test_exported_names_exist_and_unknown_names_raise():
    assert spectr_jax.__all__ == sorted(spectr_jax.__all__) and set(spectr_jax.__all__) == {
        *("load", "generate", "generate_all", "get_method", "Method", "Policy", "Tree"),
        *("check_plan", "check_method", "check_model", "transport", "FunctionalModel"),
    }
    for name in spectr_jax.__all__:
        assert getattr(spectr_jax, name) is not None and name in dir(spectr_jax)
    assert spectr_jax.transport.get("otm").name == "otm"
    with pytest.raises(AttributeError, match="generat"):
        _ = spectr_jax.generat


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_example_continues_its_prompt(name, capsys):
    exec(compile(PROGRAMS[name], "program", "exec"), found := {})
    text = capsys.readouterr().out.splitlines()[0]
    assert text.startswith("The committee will meet again next week to") and len(text) > 60
    out, tokenizer = found["out"], found["tokenizer"]
    new = np.asarray(out.tokens)[0, int(found["lengths"][0]) : int(out.lengths[0])]
    assert 0 < len(new) <= 40 and tokenizer.eos not in new[:-1] and tokenizer.bos not in new


def test_the_script_that_follows_readme_finds_its_lines_and_example():
    blocks = names_in("scripts/dev/follow_readme.py").blocks
    lines = [line for kind, text in blocks("Install") for line in text.splitlines()]
    assert {kind for kind, _ in blocks("Install")} == {"commands"}
    assert lines[0].startswith("git clone ") and lines[1].startswith("pip install -e ")
    (first, program), (second, output), *others = blocks("Example")
    assert (first, second, program) == ("program", "output", PROGRAMS["README"])
    assert output.startswith("The committee") and output in TEXTS["README"].replace("\n    ", "\n")
    assert others and all(kind == "commands" for kind, _ in others)


def test_a_wheel_has_every_published_model_but_the_97m():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = project["package-data"]["spectr_jax"]
    packed = {path for pattern in patterns for path in ROOT.glob(f"spectr_jax/{pattern}")}
    for name, weights in PUBLISHED.items():
        files = {*weight_files(weights), weights.with_name("tokenizer.model")}
        assert len(files) > 1 and (files <= packed) == (name != "97m"), name
    assert not packed & {*weight_files(PUBLISHED["97m"])}
    assert sum(path.stat().st_size for path in packed) < 70e6
    assert {ROOT / "spectr_jax/models/layers/cpu" / source for source in cpu.SOURCES} <= packed


def test_the_generate_function_does_not_hide_its_module():
    import spectr_jax.decoding.generate as module

    assert module is decoding.generate is sys.modules["spectr_jax.decoding.generate"]
    assert module.generate is spectr_jax.generate and module.Generation is decoding.Generation


def _requirements(lines):
    return sorted(filter(None, (line.partition("#")[0].strip() for line in lines)))


def _distributions(lines):
    return {re.match(r"[\w-]+", line)[0].replace("-", "_").lower() for line in lines}


def test_every_imported_module_is_a_declared_dependency():
    """A module is a dependency or belongs to an extra. `errors.EXTRAS`, which error messages use,
    lists the same extras as pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = importlib.metadata.packages_distributions()

    def comes_with(module):
        return {name.replace("-", "_").lower() for name in installed[module]}

    for extra, modules in EXTRAS.items():
        declared = _distributions(project["optional-dependencies"][extra])
        assert all(comes_with(module) & declared for module in modules)
        assert len(modules) == len(declared)
    imported = set()
    for path in ROOT.glob("spectr_jax/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    extras = {module for modules in EXTRAS.values() for module in modules}
    others = imported - sys.stdlib_module_names - {"spectr_jax"} - extras
    assert {"jax", "flax"} <= others
    required = _distributions(project["dependencies"])
    assert [module for module in others if not comes_with(module) & required] == []


def test_dependencies_and_extras_equal_requirements_txt():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"train", "eval", "hf"}
    declared = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    declared = [line for line in declared if not line.startswith("spectr_jax[")]
    requirements = (ROOT / "requirements.txt").read_text().splitlines()
    assert _requirements(declared) == _requirements(requirements)
    assert project["urls"]["Repository"] == "https://github.com/spectr-jax/spectr_jax"
