"""Says what to do when the process of a run is killed and cannot say it itself."""

import contextlib
import subprocess
from collections.abc import Iterator

_MESSAGE = (
    "\nerror: the run was killed, or ended because another of its processes was; give the same command again (all of them): "
    "it goes on from the newest checkpoint in {workdir!r}\n"
)
# Waits for a line; the end of the pipe without one means that the process is gone.
_SCRIPT = 'trap "" INT TERM HUP; read -r line || printf "%s" "$1" >&2'


@contextlib.contextmanager
def last_words(workdir: str) -> Iterator[None]:
    """A context that a process leaves alive, or else a shell beside it prints what to do."""
    beside = subprocess.Popen(["sh", "-c", _SCRIPT, "sh", _MESSAGE.format(workdir=workdir)], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        beside.communicate(b"alive\n")
