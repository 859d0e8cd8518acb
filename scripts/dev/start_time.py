"""Times a program from its start to its first word on standard output, and to its end.

    .venv/bin/python scripts/dev/start_time.py
    .venv/bin/python scripts/dev/start_time.py --runs=3 spectr_jax.sample --target=97m --draft=6m --prompt="The committee"

The first run compiles: it has an empty cache of programs. The default is README's chat.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

CHAT = ("spectr_jax.sample", "--target=smollm2", "--draft=smollm2-draft", "--chat")
QUESTION = "--prompt=Why is the sky blue?"


def timed(command: list[str], cache: str) -> tuple[float, float]:
    """Returns the seconds to the first byte of output and to the end."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache, "PYTHONUNBUFFERED": "1"}
    # As `utils.cli` sets it for its own cache.
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - started
        process.stdout.read()
    if process.returncode:
        sys.exit(f"error: exit status {process.returncode}: {' '.join(command)}")
    return first, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="runs after the first (default: 5)")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a module and its flags")
    flags = parser.parse_args()
    command = [sys.executable, "-m", *(flags.program or [*CHAT, QUESTION])]
    with tempfile.TemporaryDirectory() as cache:
        times = [timed(command, cache) for _ in range(1 + max(flags.runs, 1))]
    print("| Run | First word (s) | End (s) |\n| --- | ---: | ---: |")
    print("| First, with compilation | {:.1f} | {:.1f} |".format(*times[0]))
    medians = [statistics.median(column) for column in zip(*times[1:], strict=True)]
    print("| Second, median of {} | {:.1f} | {:.1f} |".format(len(times) - 1, *medians))


if __name__ == "__main__":
    main()
