"""Follows README.md as a new user does, and fails where README is wrong.

    python scripts/dev/follow_readme.py           # both of the following, in a few minutes
    python scripts/dev/follow_readme.py clone     # runs the lines of "Install" and "Example"
    python scripts/dev/follow_readme.py wheel     # builds dist/, installs the wheel, runs "Example"

Everything is run as printed, in a new environment of the Python that runs this script. Only git is
told to clone the last commit of this checkout instead of the address. In README a Python block is a
program, an indented block directly after it is its output, and other indented blocks are commands.
The output must be equal on a CPU with AVX-512 VNNI; elsewhere its numbers and new text may differ.
Needs a C++ compiler.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/spectr-jax/spectr_jax"
NOTE = "without CPU kernels"
MOST_BYTES = 70_000_000
"""The size of the wheel is below this."""
SETTINGS = ("PYTHON", "VIRTUAL_ENV", "GIT_", "JAX", "XLA_", "SPECTR_JAX_", "CXX")
"""Prefixes of variables that a new user has not set."""
BLOCKS = re.compile(r"^```python\n(.*?)^```\n|((?:^ {4}[^\n]*\n|^\n(?= {4}))+)", re.M | re.S)


def blocks(section: str) -> list[tuple[str, str]]:
    """Returns the blocks of a section of README: (program, output or commands, its text)."""
    readme = (ROOT / "README.md").read_text()
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", readme, re.M | re.S)[1]
    found, after_program = [], None
    for match in BLOCKS.finditer(body):
        if match[1]:
            found.append(("program", match[1]))
            after_program = match.end()
            continue
        is_output = after_program is not None and not body[after_program : match.start()].strip()
        text = textwrap.dedent(match[2]).strip("\n")
        found.append(("output" if is_output else "commands", text))
        after_program = None
    return found


def new_environment(folder: pathlib.Path, python: str) -> dict[str, str]:
    """Makes a virtual environment; returns the variables that activate it and redirect git."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return kept | {
        "PATH": f"{folder / 'bin'}:{kept['PATH']}",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{ROOT.as_uri()}.insteadOf",
        "GIT_CONFIG_VALUE_0": REPOSITORY,
    }


class User:
    """A new user: a virtual environment, and a current folder, which is empty at first."""

    def __init__(self, place: pathlib.Path):
        self.environment = new_environment(place / "venv", sys.executable)
        self.folder = place / "home"
        self.folder.mkdir()

    def run(self, line: str, given: str = "", fails: bool = False) -> tuple[str, str]:
        """Runs a shell command with `given` as its input; returns its output and its errors.

        Exits if the command does not succeed, or if it has to fail and succeeds.
        """
        started = time.monotonic()
        with tempfile.NamedTemporaryFile("r") as where:
            done = subprocess.run(
                ["bash", "-c", f"set -e\n{line}\npwd >{where.name}"],
                cwd=self.folder,
                env=self.environment,
                input=given,
                capture_output=True,
                text=True,
            )
            self.folder = pathlib.Path(where.read().rstrip("\n") or self.folder)
        print(f"{time.monotonic() - started:6.1f} s  {line}", flush=True)
        require((done.returncode != 0) == fails, f"{line!r} exits with {done.returncode}", done)
        require(NOTE not in done.stderr, f"{line!r} runs without CPU kernels", done)
        return done.stdout, done.stderr

    def follow(self, section: str, folders: dict[str, pathlib.Path]) -> None:
        """Runs a section's commands, and its programs in each of the folders."""
        found = blocks(section)
        require(bool(found), f"README has no block in {section!r}")
        for index, (kind, text) in enumerate(found):
            if kind == "commands":
                for line in text.splitlines():
                    output, _ = self.run(line)
                    require(output.strip() or not line.startswith("python"), f"{line!r} is silent")
            elif kind == "program":
                follows = found[index + 1 : index + 2]
                require(follows and follows[0][0] == "output", "a program has no output")
                self.check_program(text, follows[0][1], folders)

    def check_program(self, program: str, expected: str, folders: dict[str, pathlib.Path]) -> None:
        """Runs a program in each of the folders and compares its output with README's."""
        current = self.folder
        for name, self.folder in folders.items():
            print(f"README's program in {name} ({self.folder.name}):")
            output, _ = self.run("python -", given=program)
            print(textwrap.indent(output.rstrip("\n"), " " * 10), flush=True)
            made, printed = output.rstrip("\n"), expected
            if "avx512_vnni" not in pathlib.Path("/proc/cpuinfo").read_text():
                made, printed = form(output, program), form(expected, program)
            require(
                made == printed,
                f"README prints another output:\n{textwrap.indent(expected, ' ' * 4)}",
            )
        self.folder = current


def form(output: str, program: str) -> str:
    """Returns what is the same on all CPUs: the prompt, and the other lines without numbers."""
    prompt = re.search(r'prompts\(\["(.*?)"\]', program)[1]
    first, *others = output.rstrip("\n").splitlines()
    return "\n".join([first[: len(prompt)], *(re.sub(r"[\d.]*\d", "N", line) for line in others)])


def require(holds: object, error: str, done: subprocess.CompletedProcess | None = None) -> None:
    """Exits with an error, after the last lines that a command printed, unless it `holds`."""
    if not holds:
        printed = f"{done.stdout}{done.stderr}".splitlines()[-30:] if done else []
        sys.exit("\n".join([*printed, f"error: {error}"]))


def follow_clone(place: pathlib.Path) -> None:
    """Installs as README says; runs the example in the clone, in its parent, and elsewhere."""
    user, elsewhere = User(place), place / "elsewhere"
    parent = user.folder
    elsewhere.mkdir()
    user.follow("Install", {})
    clone = user.folder
    megabytes = sum(file.lstat().st_size for file in clone.rglob("*")) / 1e6
    print(f"the clone has {megabytes:.0f} MB")
    folders = {"the clone": clone, "its parent": parent, "an empty folder": elsewhere}
    user.follow("Example", folders)


def follow_wheel(place: pathlib.Path) -> None:
    """Builds the sdist and the wheel; runs the example in an empty folder, from the wheel."""
    builder, user = User(place / "builder"), User(place)
    builder.run("pip install --quiet build")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    builder.folder = ROOT
    builder.run("python -m build --outdir dist .")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    size = wheel.stat().st_size
    print(f"{wheel.name} has {size / 1e6:.1f} MB")
    require(size < MOST_BYTES, f"the wheel must be below {MOST_BYTES / 1e6:.0f} MB")
    user.run(f"pip install '{wheel}[hf]'")
    user.follow("Example", {"an empty folder": user.folder})
    _, errors = user.run("""python -c 'from spectr_jax import load; load("97m")'""", fails=True)
    error = errors.splitlines()[-1]
    print(f"          {error}")
    require(f"git clone --depth 1 {REPOSITORY} && pip install" in error, "97m has another error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("clone", "wheel"), help="both if left out")
    what = parser.parse_args().what
    print(f"Python {sys.version.split()[0]}", flush=True)
    for name, follow in (("clone", follow_clone), ("wheel", follow_wheel)):
        if what in (None, name):
            started = time.monotonic()
            with tempfile.TemporaryDirectory() as place:
                follow(pathlib.Path(place))
            print(f"README holds for the {name} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
