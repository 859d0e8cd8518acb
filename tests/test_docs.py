"""Tests that pages name only existing files, headings, flags and code, and are complete."""

import ast
import pathlib
import re

import pytest

from helpers import ROOT
from spectr_jax.decoding import METHODS
from spectr_jax.transport import PLANS

yaml = pytest.importorskip("yaml")  # ml_collections installs PyYAML.

PACKAGE = ROOT / "spectr_jax"
SITE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = [
    *(*SITE, ROOT / "CHANGELOG.md", PACKAGE / "embedded/README.md"),
    *sorted(ROOT.glob("results/**/*.md")),
]
MODULES = sorted(PACKAGE.glob("**/*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def _outside_code(page: pathlib.Path) -> str:
    return re.sub(r"^```[\s\S]*?^```$|^ {4}.*$", "", page.read_text(), flags=re.MULTILINE)


def _anchors(page: pathlib.Path) -> list[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _outside_code(page), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]


def _code(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def _section(heading: str) -> str:
    """Returns a section of the architecture page."""
    page = (ROOT / "docs/architecture.md").read_text()
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_point_to_existing_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", _outside_code(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in _anchors(target), link


@pytest.mark.parametrize("page", SITE, ids=_name)
def test_files_named_on_a_page_exist(page):
    names = r"(?<![\w/.])(?:configs|docs|scripts|tests)/[\w/]+\.\w+"
    for path in re.findall(names, page.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", SITE, ids=_name)
def test_commands_on_a_page_use_defined_flags(page):
    for module, rest in re.findall(r"python -m spectr_jax\.(\w+)([^#`\n]*)", page.read_text()):
        files = [PACKAGE / f"{module}.py", PACKAGE / "utils/cli.py"]
        source = "".join(path.read_text() for path in files)
        known = set(re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", source))
        assert known.issuperset(named := re.findall(r" --(\w+)", rest)), (module, named)


@pytest.mark.parametrize("page", SITE, ids=_name)
def test_examples_import_existing_names(page):
    for block in _code(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spectr_jax"):
                exec(ast.unparse(node), {})


def test_the_example_plan_runs_and_is_optimal():
    example, *_ = _code(ROOT / "docs/extending.md")
    names: dict = {}
    exec(example, names)
    p, q, plan = names["p"], names["q"], names["plan"]
    best = names["transport"].optimal_acceptance(p, q, k=8)
    assert plan.acceptance(p, q, k=8) == pytest.approx(best, abs=1e-9)
    assert plan.pmf(p, q, names["drafts"]).sum() == pytest.approx(1)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_policies_in_examples_name_eos(page):
    """Without it, a continuation runs past the end of its text."""
    nodes = [node for code in _code(page) for node in ast.walk(ast.parse(code))]
    called = [
        node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    policies = [
        {given.arg for given in call.keywords} for call in called if call.func.id == "Policy"
    ]
    assert all("eos" in given for given in policies)
    generated = [call for call in called if call.func.id in ("generate", "generate_all", "stream")]
    assert all("policy" in ast.unparse(call) for call in generated)


def test_the_results_index_lists_all_folders_and_notes():
    index = (ROOT / "results/README.md").read_text()
    folders = {path.name for path in ROOT.glob("results/*/")} - {"notes"}
    assert [name for name in sorted(folders) if f"| [`{name}/`]" not in index] == []
    notes = [path.name for path in ROOT.glob("results/notes/*.md")]
    assert [name for name in notes if f"](notes/{name})" not in index] == []


def test_the_gallery_has_all_figures():
    gallery = (ROOT / "results/gallery.md").read_text()
    figures = [str(path.relative_to(ROOT / "results")) for path in ROOT.glob("results/**/*.png")]
    assert [name for name in figures if f"]({name})" not in gallery] == []


def test_headings_on_the_sites_first_page_are_unique():
    """scripts/dev/docs.py joins all pages into one, where links need unique anchors."""
    anchors = [anchor for page in SITE for anchor in _anchors(page)]
    assert sorted(set(anchors)) == sorted(anchors)


@pytest.mark.parametrize("name", ["test", "publish"])
def test_workflows_run_scripts_that_exist(name):
    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    scripts = re.findall(r"scripts/[\w/]+\.\w+", " ".join(step.get("run", "") for step in steps))
    assert scripts and all((ROOT / script).exists() for script in scripts)
    assert workflow[True]  # YAML 1.1 reads the key `on` as True.


def test_github_tests_the_oldest_and_the_newest_jax():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    job = workflow["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    lock = (ROOT / "requirements.lock").read_text()
    locked = re.findall(r'^jax==0\.(\d+)\.\d+ ; python_version (\S+) "3\.12"$', lock, re.M)
    assert locked == [("10", "<"), ("11", ">=")]
    assert "scripts/test.sh --all" in [step.get("run") for step in job["steps"]]


@pytest.mark.parametrize(
    ("heading", "named"), [("Methods", METHODS), ("Plans", PLANS)], ids=["methods", "plans"]
)
def test_the_architecture_page_lists_all_methods_and_plans(heading, named):
    rows = [line.split("|")[1] for line in _section(heading).splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`([^`]+)`", row)) == sorted(named)


def _imported_packages(path: pathlib.Path) -> set[str]:
    """Returns the packages of spectr_jax that a module imports, inside functions too."""
    modules: list[str] = []
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return {module.split(".")[1] for module in modules if module.startswith("spectr_jax.")}


def test_imports_between_packages_match_the_architecture_page():
    page = _section("The packages").split("\nImports run one way")[1]
    lines = re.findall(r"^    (\w+) +(-|\w+(?:, \w+)*)$", page, re.MULTILINE)
    said = {package: set(re.findall(r"\w+", imports)) for package, imports in lines}
    sentences = page.split("The entry points ")[1].split(". ")[:2]
    entries, servants = (set(re.findall(r"`(\w+)`", sentence)) for sentence in sentences)
    found: dict[str, set[str]] = {}
    for path in MODULES:
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found[package] = found.get(package, set()) | _imported_packages(path) - {package}
    assert found.keys() == {*said, *entries, *servants, "__init__"}
    assert {package: found[package] - servants for package in said} == said
    assert all(found[package] <= servants for package in servants)
    assert not entries & set().union(*found.values())
    for index, (package, _) in enumerate(lines):
        assert said[package] <= {below for below, _ in lines[index + 1 :]}, package


def test_the_package_docstring_lists_all_subpackages():
    packages = {path.relative_to(PACKAGE).parts[0] for path in MODULES if path.parent != PACKAGE}
    docstring = ast.get_docstring(TREES[PACKAGE / "__init__.py"]) or ""
    assert set(re.findall(r"^\| `spectr_jax\.(\w+)` \|", docstring, re.MULTILINE)) == packages


def test_modules_have_docstrings():
    assert [path.name for path in MODULES if not ast.get_docstring(TREES[path])] == []


def test_formulas_in_docstrings_are_valid_markdown():
    """A formula has no control character, which an unescaped backslash would make. It is not
    indented, because Markdown reads indented lines as code."""
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    formulas = [docstring for docstring in docstrings if "$$" in docstring]
    assert formulas
    for docstring in formulas:
        assert docstring.count("$$") % 2 == 0, docstring
        assert not re.search(r"[\x00-\x09\x0b-\x1f]", docstring), docstring
        assert not re.search(r"^ {4,}.*\$\$", docstring, re.MULTILINE), docstring


def test_the_citation_file_is_valid():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["message"] and citation["title"] and citation["authors"]
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference), reference["title"]
        for author in reference["authors"]:
            assert set(author) in ({"family-names", "given-names"}, {"name"}), author
        for identifier in reference.get("identifiers", ()):
            assert re.fullmatch(r"arXiv:\d{4}\.\d{5}", identifier["value"]), identifier


def test_changelog_and_citation_name_the_current_version():
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.+)"$', project, re.MULTILINE)[1]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
