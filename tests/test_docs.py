"""Pages about the project: what they point to exists, and what they say can run. scripts/docs.sh
renders the site."""

import ast
import pathlib
import re

import pytest

from spectr_jax.decoding import METHODS
from spectr_jax.transport import PLANS

yaml = pytest.importorskip("yaml")  # Comes with ml_collections.

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
SITE = [README, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
PAGES = [*SITE, ROOT / "CHANGELOG.md", *sorted(ROOT.glob("results/**/*.md"))]
MODULES = sorted(ROOT.glob("spectr_jax/**/*.py"))


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def _outside_code(page: pathlib.Path) -> str:
    return re.sub(r"^```[\s\S]*?^```$|^ {4}.*$", "", page.read_text(), flags=re.MULTILINE)


def _headings(page: pathlib.Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", _outside_code(page), re.MULTILINE)


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _code(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_point_to_files_and_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", _outside_code(page)):
        if not re.match(r"[a-z]+:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in map(_anchor, _headings(target)), link


@pytest.mark.parametrize("page", SITE, ids=_name)
def test_files_that_are_named_exist(page):
    for path in re.findall(
        r"(?<![\w/.])(?:configs|docs|scripts|tests)/[\w/]+\.\w+", page.read_text()
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", SITE, ids=_name)
def test_commands_have_flags_that_exist(page):
    for module, rest in re.findall(r"python -m spectr_jax\.(\w+)([^#`\n]*)", page.read_text()):
        places = [
            ROOT / f"spectr_jax/{module}.py",
            ROOT / f"spectr_jax/{module}/__main__.py",
            ROOT / "spectr_jax/utils/cli.py",
        ]
        source = "".join(path.read_text() for path in places if path.exists())
        known = set(re.findall(r"DEFINE_\w+\(\s*\"(\w+)\"", source))
        assert known.issuperset(named := re.findall(r" --(\w+)", rest)), (module, named)


@pytest.mark.parametrize("page", SITE, ids=_name)
def test_examples_import_what_exists(page):
    for block in _code(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spectr_jax"):
                exec(ast.unparse(node), {})


def test_the_example_of_a_plan_runs():
    example, *_ = _code(ROOT / "docs/extending.md")
    names: dict = {}
    exec(example, names)
    p, q, plan = names["p"], names["q"], names["plan"]
    assert plan.acceptance(p, q, k=8) == pytest.approx(
        names["transport"].optimal_acceptance(p, q, k=8), abs=1e-9
    )
    assert plan.pmf(p, q, names["drafts"]).sum() == pytest.approx(1)


def test_the_index_of_results_has_all_folders():
    index = (ROOT / "results/README.md").read_text()
    for folder in ROOT.glob("results/*/"):
        named = (
            f"](notes/{next(folder.glob('*.md')).name}"
            if folder.name == "notes"
            else f"| [`{folder.name}/`]"
        )
        assert named in index, folder.name
    for note in ROOT.glob("results/notes/*.md"):
        assert f"](notes/{note.name})" in index, note.name


def test_headings_of_the_first_page_differ():
    """Links to them are links inside one page there."""
    headings = [_anchor(heading) for page in SITE for heading in _headings(page)]
    assert len(set(headings)) == len(headings), sorted(
        heading for heading in set(headings) if headings.count(heading) > 1
    )


@pytest.mark.parametrize("name", ["test", "publish"])
def test_workflows_run_scripts_that_exist(name):
    workflow = yaml.safe_load((ROOT / f".github/workflows/{name}.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    scripts = re.findall(r"scripts/[\w/]+\.\w+", " ".join(step.get("run", "") for step in steps))
    assert scripts and all((ROOT / script).exists() for script in scripts)
    assert workflow[True]  # YAML 1.1 reads the key `on` as a truth value.


def test_github_tests_the_oldest_and_the_newest_jax():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())
    job = workflow["jobs"]["test"]
    found = [(each["python"], each["jax"]) for each in job["strategy"]["matrix"]["include"]]
    assert found == [("3.11", ""), ("3.12", "jax")]
    assert "scripts/test.sh --all" in [step.get("run") for step in job["steps"]]


@pytest.mark.parametrize(("heading", "named"), [("Methods", METHODS), ("Plans", PLANS)])
def test_the_tables_of_the_architecture_have_all(heading, named):
    section = (
        (ROOT / "docs/architecture.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`([^`]+)`", row)) == sorted(named)


def _imported_parts(path: pathlib.Path) -> set[str]:
    """The names behind `spectr_jax.` in all imports of a module, also of those inside functions."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import"
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return {module.split(".")[1] for module in modules if module.startswith("spectr_jax.")}


def test_imports_run_as_the_architecture_says():
    page = (
        (ROOT / "docs/architecture.md")
        .read_text()
        .split("\nImports run one way")[1]
        .split("\n## ")[0]
    )
    lines = re.findall(r"^    (\w+) +(-|\w+(?:, \w+)*)$", page, re.MULTILINE)
    said = {part: set(re.findall(r"\w+", behind)) for part, behind in lines}
    entries, servants = (
        set(re.findall(r"`(\w+)`", text))
        for text in page.split("The entry points ")[1].split(". ")[:2]
    )
    found: dict[str, set[str]] = {}
    for path in MODULES:
        part = path.relative_to(ROOT / "spectr_jax").parts[0].removesuffix(".py")
        found[part] = found.get(part, set()) | _imported_parts(path) - {part}
    assert found.keys() == {*said, *entries, *servants, "__init__"}
    assert {part: found[part] - servants for part in said} == said
    assert all(found[part] <= servants for part in servants) and not entries & set().union(
        *found.values()
    )
    for index, (part, _) in enumerate(lines):
        assert said[part] <= {below for below, _ in lines[index + 1 :]}, part


def test_the_first_page_has_all_rooms():
    rooms = {
        path.relative_to(ROOT / "spectr_jax").parts[0]
        for path in MODULES
        if path.parent.name != "spectr_jax"
    }
    named = re.findall(
        r"^\| `spectr_jax\.(\w+)` \|", (ROOT / "spectr_jax/__init__.py").read_text(), re.MULTILINE
    )
    assert set(named) == rooms


def test_modules_have_docstrings():
    assert [
        path.name for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))
    ] == []


def test_formulas_are_typeset():
    """No backslash is an escape of Python's, and none stands indented, which is code in
    Markdown."""
    pages = 0
    for node in (node for path in MODULES for node in ast.walk(ast.parse(path.read_text()))):
        docstring = (
            ast.get_docstring(node)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            else None
        )
        if docstring and "$$" in docstring:
            pages += 1
            assert docstring.count("$$") % 2 == 0 and not re.search(
                r"[\x00-\x09\x0b-\x1f]", docstring
            ), docstring
            assert not re.search(r"^ {4,}.*\$\$", docstring, re.MULTILINE), docstring
    assert pages > 10


def test_citation():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["message"] and citation["title"] and citation["authors"]
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text()
    for reference in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(reference), reference["title"]
        for author in reference["authors"]:
            assert set(author) in ({"family-names", "given-names"}, {"name"}), author
        for identifier in reference.get("identifiers", ()):
            assert re.fullmatch(r"arXiv:\d{4}\.\d{5}", identifier["value"]), identifier


def test_changelog_has_this_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[
        1
    ]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
