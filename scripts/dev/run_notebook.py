"""Runs a notebook from top to bottom, and fails where a cell fails.

    python scripts/dev/run_notebook.py scripts/spectr_colab.ipynb --smoke --out=runs/colab.ipynb
    python scripts/dev/run_notebook.py scripts/spectr_colab.ipynb --smoke --python=python3.12

With --smoke it takes two or three minutes on two CPU cores. With --python it runs as on Colab: in an
empty folder and a new environment of that Python, where the notebook installs the last commit of
this checkout. JAX='jax[tpu]' in the environment then is the accelerator's package. The notebook
itself stays as it is, because notebooks in the repository have no outputs. Needs the packages of
requirements-docs.txt.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import nbformat
from follow_readme import NOTE, ROOT, new_environment
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

SMOKE = re.compile(r"^SMOKE = False\b", re.MULTILINE)
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument("--smoke", action="store_true", help="set SMOKE = True: toy sizes")
    parser.add_argument("--python", help="a Python, in a new environment of which it runs")
    parser.add_argument("--cells", type=int, help="run only this many of its cells of code")
    parser.add_argument("--out", type=pathlib.Path, help="where to write it with its outputs")
    flags = parser.parse_args()
    if not flags.notebook.is_file():
        parser.error(f"{flags.notebook}: is not a file; fix the path")
    if flags.out is not None and flags.out.resolve() == flags.notebook.resolve():
        parser.error(f"--out={flags.out}: is the notebook itself; give another file")
    if flags.python is not None and shutil.which(flags.python) is None:
        parser.error(f"--python={flags.python}: is not a program; give a Python")
    notebook = nbformat.read(flags.notebook, as_version=4)
    code = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    notebook.cells = notebook.cells[: code[: flags.cells][-1] + 1]
    if flags.smoke:
        cells = [cell for cell in notebook.cells if SMOKE.search(cell.source)]
        if len(cells) != 1:
            parser.error(f"--smoke: {len(cells)} cells set SMOKE = False; exactly one must")
        cells[0].source = SMOKE.sub("SMOKE = True", cells[0].source)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        try:
            run(notebook, pathlib.Path(place), flags.python)
        except CellExecutionError as error:
            sys.exit(f"error: a cell failed\n{COLORS.sub('', str(error))}")
        finally:
            if flags.out is not None:
                flags.out.parent.mkdir(parents=True, exist_ok=True)
                nbformat.write(notebook, flags.out)
    if flags.python is not None and NOTE in nbformat.writes(notebook):
        sys.exit("error: the notebook runs without CPU kernels; --out=FILE shows the note")
    print(f"{flags.notebook} ran in {time.monotonic() - started:.0f} s")


def run(notebook: nbformat.NotebookNode, place: pathlib.Path, python: str | None) -> None:
    """Executes a notebook in this checkout, or in a folder and an environment in `place`."""
    folder, environment = ROOT, dict(os.environ)
    if python is not None:
        folder, environment = place / "content", new_environment(place / "venv", python)
        folder.mkdir()
        environment |= {name: os.environ[name] for name in ["JAX"] if name in os.environ}
        pip = [place / "venv/bin/python", "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "ipykernel"], check=True)  # Colab has it already.
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(notebook, kernel_name="python3", timeout=3_600, resources=resources)
    manager = client.create_kernel_manager()
    # Other users could connect to ports.
    manager.transport, manager.ip = "ipc", f"{place}/kernel"
    if python is not None:
        manager.kernel_spec.argv[0] = f"{place}/venv/bin/python"
    started = time.monotonic()
    client.on_cell_executed = lambda cell, cell_index, execute_reply: print(
        f"{time.monotonic() - started:6.1f} s  cell {cell_index} is done", flush=True
    )
    client.execute(env=environment)


if __name__ == "__main__":
    main()
