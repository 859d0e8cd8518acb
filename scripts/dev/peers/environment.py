"""Environments of other software beside ours, and the workers that run in them: a JSON request a
line, an answer a line."""

import json
import pathlib
import subprocess
import sys
from typing import Any

from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import write_whole


def made(folder: pathlib.Path, requirements: tuple[str, ...]) -> str:
    """The interpreter of the virtual environment `folder`, which is made if it is not there with
    these requirements.

    Raises:
      UserError: it could not be made.
    """
    python, stamp, wanted = (
        str(folder / "bin" / "python"),
        folder / "installed",
        "\n".join(requirements),
    )
    if not (stamp.is_file() and stamp.read_text() == wanted):
        print(f"installing {', '.join(requirements)} into {folder.name}", flush=True)
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *requirements,
        ]
        for command in ([sys.executable, "-m", "venv", str(folder)], install):
            if subprocess.run(command).returncode:
                raise UserError(
                    f"{folder.name} could not be made (see above); make one and name its "
                    "interpreter"
                )
        write_whole(stamp, wanted)
    return python


def ask(worker: subprocess.Popen, **request: Any) -> dict[str, Any]:
    """The answer of a worker to a request; raises `UserError` if it has stopped."""
    assert worker.stdin is not None and worker.stdout is not None  # Both are pipes.
    try:
        print(json.dumps(request), file=worker.stdin, flush=True)
        answer = worker.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        worker.stdin = None  # What is left in it has no reader.
        raise UserError(f"the worker stopped at {request['op']!r} (see above)")
    return json.loads(answer)
