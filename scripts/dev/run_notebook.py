"""Runs a notebook from top to bottom, and fails where a cell fails.

    python scripts/dev/run_notebook.py scripts/spectr_colab.ipynb --smoke --out=runs/spectr_colab.ipynb

With --smoke two or three minutes on two CPU cores. The file itself is never written: in the repository notebooks have no
outputs. Needs the packages of requirements-docs.txt.
"""

import argparse
import pathlib
import re
import sys
import tempfile
import time
from typing import NoReturn

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMOKE = re.compile(r"^SMOKE = False\b", re.MULTILINE)
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def with_smoke(notebook) -> None:
    """Sets the parameter `SMOKE` of the notebook."""
    cells = [
        cell for cell in notebook.cells if cell.cell_type == "code" and SMOKE.search(cell.source)
    ]
    if len(cells) != 1:
        refuse(f"the notebook sets SMOKE = False in {len(cells)} cells; --smoke needs it in one")
    cells[0].source = SMOKE.sub("SMOKE = True", cells[0].source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument(
        "--smoke", action="store_true", help="with SMOKE = True: everything at toy size"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="where the notebook goes with its outputs (default: nowhere)",
    )
    parser.add_argument(
        "--timeout", type=float, default=3_600, help="seconds that one cell may take"
    )
    flags = parser.parse_args()
    if not flags.notebook.is_file():
        refuse(f"no notebook at {flags.notebook}; fix the path")
    if flags.out is not None and flags.out.resolve() == flags.notebook.resolve():
        refuse(f"--out={flags.out} is the notebook itself; give another file")

    notebook = nbformat.read(flags.notebook, as_version=4)
    if flags.smoke:
        with_smoke(notebook)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=flags.timeout,
        resources={"metadata": {"path": ROOT}},
    )
    begun = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as sockets
    ):  # In the place of ports that all users of the machine can reach.
        manager = client.create_kernel_manager()
        manager.transport, manager.ip = "ipc", f"{sockets}/kernel"
        try:
            client.execute()
        except CellExecutionError as error:
            sys.exit(f"error: a cell failed\n{COLOURS.sub('', str(error))}")
        finally:
            if flags.out is not None:
                flags.out.parent.mkdir(parents=True, exist_ok=True)
                nbformat.write(notebook, flags.out)
    print(f"{flags.notebook} ran in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
