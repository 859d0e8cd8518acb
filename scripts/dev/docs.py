"""What scripts/docs.sh runs, with pdoc: one page a module, and the Markdown pages of the repository
on the first."""

import importlib
import pathlib
import re
import shutil
import sys
import warnings

import pdoc
from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENTRY_POINT = "\nif __name__ == "


def import_module(path: pathlib.Path) -> str:
    """Imports a module of the package; entry points define the same flags, which one process can
    have once. Its name."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    if ENTRY_POINT in path.read_text():
        before = set(flags.FLAGS)
        importlib.import_module(name)
        for flag in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, flag)
    else:
        importlib.import_module(name)
    return name


def list_modules(package) -> None:
    """Adds its modules to what a package exports, for the navigation: pdoc leaves out those that
    `__all__` does not name."""
    if hasattr(package, "__all__"):
        for name in package.__all__:
            setattr(
                package, name, getattr(package, name)
            )  # A name that is imported when asked for is not there yet.
        paths = pathlib.Path(package.__path__[0]).glob("[!_]*")
        modules = sorted(
            path.stem for path in paths if path.suffix == ".py" or any(path.glob("*.py"))
        )
        package.__all__ = [
            *package.__all__,
            *(name for name in modules if name not in package.__all__),
        ]


def drop_boilerplate(module) -> None:
    """Drops what Python itself says of each NamedTuple and of each of its fields."""
    for record in vars(module).values():
        if isinstance(record, type) and hasattr(record, "_fields"):
            record.__new__.__doc__ = None
            for field in record._fields:
                getattr(record, field).__doc__ = None


def included_pages() -> dict[pathlib.Path, str]:
    """The Markdown pages on the first page of the site, and the anchor of each one's title
    there."""
    pages = re.findall(
        r"^\.\. include:: (\S+)$", (ROOT / "spectr_jax/__init__.py").read_text(), re.MULTILINE
    )
    files = [(ROOT / "spectr_jax" / page).resolve() for page in pages]
    titles = [file.read_text().partition("\n")[0].removeprefix("# ") for file in files]
    anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return dict(zip(files, anchors, strict=True))


def with_local_links(page: str, folder: pathlib.Path) -> str:
    """The first page with links that work: within it to the pages that it includes, and to copies
    of other files."""
    included = included_pages()

    def linked(match: re.Match) -> str:
        link, _, anchor = match[1].partition("#")
        for base in (
            ROOT,
            ROOT / "docs",
        ):  # Where the README is, and where the pages that are included are.
            file = (base / link).resolve()
            if link and file in included:
                return f'href="#{anchor or included[file]}"'
            if (
                link
                and not (folder / link).exists()
                and file.is_file()
                and file.is_relative_to(ROOT)
            ):
                place = file.relative_to(ROOT)
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / place)
                return f'href="{place}{"#" if anchor else ""}{anchor}"'
        return match[0]

    return re.sub(r'href="([^":]+)"', linked, page)


def main(folder: pathlib.Path) -> None:
    sys.path.insert(0, str(ROOT))
    names = [import_module(path) for path in sorted(ROOT.glob("spectr_jax/**/*.py"))]
    packages = sorted({name.rpartition(".")[0] for name in names} - {""})
    for package in packages:
        list_modules(sys.modules[package])
    for name in names:
        drop_boilerplate(sys.modules[name])
    warnings.simplefilter(
        "error"
    )  # A page that is not there, a link or an annotation that does not resolve.
    pdoc.render.configure(docformat="google", math=True, template_directory=ROOT / "docs/theme")
    pdoc.pdoc(*packages[:1], output_directory=folder)
    first = folder / "spectr_jax.html"
    first.write_text(with_local_links(first.read_text(), folder))
    print(f"the documentation is in {folder / 'index.html'}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
