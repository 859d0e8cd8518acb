"""Renders the documentation with pdoc, for scripts/docs.sh.

The site has one page per module. The first page also has the Markdown pages of the repository.
"""

import importlib
import pathlib
import re
import shutil
import sys
import warnings

import pdoc
from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]


def import_module(path: pathlib.Path) -> str:
    """Imports a module of the package and returns its name.

    Entry points define the same flags, so the flags of each are removed before the next import.
    """
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    before = set(flags.FLAGS)
    importlib.import_module(name)
    if "\nif __name__ == " in path.read_text():
        for flag in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, flag)
    return name


def list_modules(package) -> list[str]:
    """Makes a package's page list its modules; returns the full names of what it exports.

    Each name is documented once, on the page of its module.
    """
    exported = [getattr(package, name) for name in getattr(package, "__all__", ())]
    paths = sorted(pathlib.Path(package.__path__[0]).glob("[!_]*"))
    modules = [path.stem for path in paths if path.suffix == ".py" or any(path.glob("*.py"))]
    package.__all__ = modules
    return [
        f"{each.__module__}.{each.__qualname__}" for each in exported if hasattr(each, "__module__")
    ]


def drop_boilerplate(module) -> None:
    """Drops Python's generated docstrings of NamedTuples and their fields."""
    for record in vars(module).values():
        if isinstance(record, type) and hasattr(record, "_fields"):
            record.__new__.__doc__ = None
            for field in record._fields:
                getattr(record, field).__doc__ = None


def included_pages() -> dict[pathlib.Path, str]:
    """Returns the Markdown files of the site's first page, with the anchors of their titles."""
    files = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "CONTRIBUTING.md"]
    titles = [file.read_text().partition("\n")[0].removeprefix("# ") for file in files]
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return dict(zip(files, anchors, strict=True))


def with_local_links(page: str, folder: pathlib.Path) -> str:
    """Returns the first page with links to included pages and to copies of other files."""
    included = included_pages()

    def linked(match: re.Match) -> str:
        link, _, anchor = match[1].partition("#")
        for base in (ROOT, ROOT / "docs"):  # The folders of the README and of the other pages.
            file = (base / link).resolve()
            if link and file in included:
                return f'href="#{anchor or included[file]}"'
            in_repository = file.is_file() and file.is_relative_to(ROOT)
            if link and not (folder / link).exists() and in_repository:
                place = file.relative_to(ROOT)
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / place)
                return f'href="{place}{"#" if anchor else ""}{anchor}"'
        return match[0]

    return re.sub(r'href="([^":]+)"', linked, page)


def main(folder: pathlib.Path) -> None:
    sys.path.insert(0, str(ROOT))
    names = [import_module(path) for path in sorted(ROOT.glob("spectr_jax/**/*.py"))]
    first = sys.modules["spectr_jax"]
    packages = sorted({name.rpartition(".")[0] for name in names} - {""})
    exported = {package: list_modules(sys.modules[package]) for package in packages}
    public = ", ".join(f"`{name}`" for name in sorted(exported["spectr_jax"]))
    included = [f"\n.. include:: ../{page.relative_to(ROOT)}\n" for page in included_pages()]
    about = f"{first.__doc__}\n\nPublic names: {public}.\n"
    first.__doc__ = about + "".join(included)
    for name in names:
        drop_boilerplate(sys.modules[name])
    warnings.simplefilter("error")  # For missing pages, links and annotations.
    pdoc.render.configure(docformat="google", math=True, template_directory=ROOT / "docs/theme")
    # pdoc would import the compiled CPU kernels, which are not a Python module.
    pdoc.pdoc("spectr_jax", r"!spectr_jax\..*\._products", output_directory=folder)
    page = folder / "spectr_jax.html"
    page.write_text(with_local_links(page.read_text(), folder))
    print(f"the documentation is in {folder / 'index.html'}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
