"""Runs a notebook from top to bottom, and fails where a cell fails.

    python scripts/dev/run_notebook.py scripts/spectr_colab.ipynb --smoke --out=runs/colab.ipynb

With --smoke it takes two or three minutes on two CPU cores. The notebook itself stays as it is,
because notebooks in the repository have no outputs. Needs the packages of requirements-docs.txt.
"""

import argparse
import pathlib
import re
import sys
import tempfile
import time

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMOKE = re.compile(r"^SMOKE = False\b", re.MULTILINE)
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument("--smoke", action="store_true", help="set SMOKE = True: toy sizes")
    parser.add_argument("--out", type=pathlib.Path, help="where to write it with its outputs")
    flags = parser.parse_args()
    if not flags.notebook.is_file():
        parser.error(f"{flags.notebook}: is not a file; fix the path")
    if flags.out is not None and flags.out.resolve() == flags.notebook.resolve():
        parser.error(f"--out={flags.out}: is the notebook itself; give another file")
    notebook = nbformat.read(flags.notebook, as_version=4)
    if flags.smoke:
        cells = [cell for cell in notebook.cells if SMOKE.search(cell.source)]
        if len(cells) != 1:
            parser.error(f"--smoke: {len(cells)} cells set SMOKE = False; exactly one must")
        cells[0].source = SMOKE.sub("SMOKE = True", cells[0].source)
    started, resources = time.monotonic(), {"metadata": {"path": ROOT}}
    client = NotebookClient(notebook, kernel_name="python3", timeout=3_600, resources=resources)
    with tempfile.TemporaryDirectory() as sockets:  # Other users could connect to ports.
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{sockets}/kernel"
        try:
            client.execute()
        except CellExecutionError as error:
            sys.exit(f"error: a cell failed\n{COLORS.sub('', str(error))}")
        finally:
            if flags.out is not None:
                flags.out.parent.mkdir(parents=True, exist_ok=True)
                nbformat.write(notebook, flags.out)
    print(f"{flags.notebook} ran in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
