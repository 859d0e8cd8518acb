"""Files about the project: what they point to exists. scripts/docs.sh renders the site, with warnings as errors."""

import ast
import pathlib
import re

import pytest

yaml = pytest.importorskip("yaml")  # Comes with ml_collections.

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted(ROOT.glob("docs/*.md"))]
MODULES = sorted(ROOT.glob("spectr_jax/**/*.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_relative_links_point_to_files(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not re.match(r"[a-z]+:|#", link):
            assert (page.parent / link.partition("#")[0]).exists(), link


def test_the_first_page_of_the_site_has_the_others():
    included = re.findall(r"^\.\. include:: (\S+)$", (ROOT / "spectr_jax/__init__.py").read_text(), re.MULTILINE)
    places = {(ROOT / "spectr_jax" / path).resolve() for path in included}
    assert places == {page for page in PAGES if page.name != "CHANGELOG.md"}


def test_the_first_page_has_all_rooms():
    rooms = {path.parent.name for path in MODULES} - {"spectr_jax"}
    named = re.findall(r"^\| `spectr_jax\.(\w+)` \|", (ROOT / "spectr_jax/__init__.py").read_text(), re.MULTILINE)
    assert set(named) == rooms


def test_modules_have_docstrings():
    assert [path.name for path in MODULES if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_formulas_are_typeset():
    """No backslash is an escape of Python's, and none stands indented, which is code in Markdown."""
    pages = 0
    for node in (node for path in MODULES for node in ast.walk(ast.parse(path.read_text()))):
        docstring = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else None
        if docstring and "$$" in docstring:
            pages += 1
            assert docstring.count("$$") % 2 == 0 and not re.search(r"[\x00-\x09\x0b-\x1f]", docstring), docstring
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
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
