"""The speed stage of compare_llama_cpp.py: one sequence, token by token, ours, llama.cpp and
transformers in turns."""

import json
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from peers.environment import ask
from peers.llama_cpp_build import Built

from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.loading.by_name import EMBEDDED, SMOLLM2, Trained, load
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.formats.hf_llama import save_llama
from spectr_jax.models.frozen import freeze
from spectr_jax.utils.errors import UserError

PROMPT_TOKENS = 8
Runs = dict[str, Callable[[int], float]]
"""Functions of a seed that return tokens per second."""


def our_run(
    target: Trained, draft: Trained | None, method: Method, new_tokens: int
) -> Callable[[int], float]:
    """Generation at temperature 1, as a user calls it; the call on the prompt is part of its
    time."""
    text = (EMBEDDED / "prompts.txt").read_text().replace("\n", " ")
    prompt = np.array([target.tokenizer.encode(text)[:PROMPT_TOKENS]])
    models = freeze(target.model), freeze(draft.model) if draft else None
    lengths = np.array([PROMPT_TOKENS])

    def run(seed: int) -> float:
        key = jax.block_until_ready(jax.random.key(seed))
        started = time.perf_counter()
        jax.block_until_ready(generate(key, method, *models, prompt, lengths, new_tokens))
        return new_tokens / (time.perf_counter() - started)

    return run


def our_runs(draft_name: str, new_tokens: int) -> tuple[Runs, Trained]:
    """The baseline in each precision, and `block` with chains of one and two in the first; and the
    target in float32."""
    runs: Runs = {}
    target, (draft,) = load_pair(SMOLLM2, (draft_name,), "int8")
    for length in (1, 2):
        method = get_method("block", draft_length=length)
        runs[f"spectr_jax int8, drafts, L = {length}"] = our_run(target, draft, method, new_tokens)
    for dtype in ("int8", "bfloat16", "float32"):
        alone = load(SMOLLM2, dtype)
        runs[f"spectr_jax {dtype}"] = our_run(alone, None, get_method("baseline"), new_tokens)
    return runs, alone


def bench_run(files: Built, kind: str, new_tokens: int, threads: int) -> Callable[[int], float]:
    """llama-bench, a process each time, which warms up before it measures; no prompt."""
    command = [
        str(files.programs / "llama-bench"),
        "-m",
        files.files[kind],
        "-p",
        "0",
        "-n",
        str(new_tokens),
    ]

    def run(seed: int) -> float:
        done = subprocess.run(
            [*command, "-t", str(threads), "-r", "1", "-o", "json"], capture_output=True, text=True
        )
        if done.returncode:
            raise UserError(f"llama-bench failed on {kind}: {done.stderr[-300:]}; fix what it says")
        return float(json.loads(done.stdout)[0]["avg_ts"])

    return run


def transformers_run(
    worker: subprocess.Popen, new_tokens: int, threads: int
) -> Callable[[int], float]:
    def run(seed: int) -> float:
        made = ask(
            worker,
            op="generate",
            new_tokens=new_tokens,
            prompt_tokens=PROMPT_TOKENS,
            threads=threads,
            seed=seed,
        )
        return new_tokens / made["seconds"]

    return run


def compare_speed(
    files: Built, peers_python: str, draft: str, rounds: int, new_tokens: int
) -> dict[str, Any]:
    """Tokens per second in every round, which has an order of its own; the first round warms up and
    is left out."""
    threads, load_before = os.cpu_count() or 1, os.getloadavg()[0]
    runs, exact = our_runs(draft, new_tokens)
    runs |= {
        f"llama.cpp {kind}": bench_run(files, kind, new_tokens, threads)
        for kind in ("Q4_1", "Q8_0", "F16", "F32")
    }
    worker_file, pipe = pathlib.Path(__file__).with_name("llama_worker.py"), subprocess.PIPE
    command = [peers_python, str(worker_file)]
    with (
        tempfile.TemporaryDirectory() as here,
        subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as worker,
    ):
        save_llama(pathlib.Path(here), exact.model, bos=1, eos=2)
        versions = ask(worker, op="versions")
        ask(worker, op="load", folder=here)
        runs["transformers float32"] = transformers_run(worker, new_tokens, threads)
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for round_ in range(rounds + 1):
            for index in np.random.default_rng(round_).permutation(len(runs)):
                name = list(runs)[index]
                speeds[name].append(runs[name](round_))
            print(
                f"round {round_} of {rounds}: "
                + ", ".join(f"{n} {s[-1]:.1f}" for n, s in speeds.items()),
                flush=True,
            )
    kept = {name: own[1:] for name, own in speeds.items()}
    rows = [
        summary(name, kept)
        for name in sorted(kept, key=lambda name: -statistics.median(kept[name]))
    ]
    told = {
        "threads": threads,
        "rounds": rounds,
        "new_tokens": new_tokens,
        "load": load_before,
        "draft": draft,
    }
    return {
        "rows": rows,
        **told,
        "transformers": versions["transformers"],
        "torch": versions["torch"],
    }


def summary(name: str, kept: dict[str, list[float]]) -> dict[str, Any]:
    """The median speed of a row, and the medians of its ratios to others of the same round."""
    ratios = {
        f"to_{other}": statistics.median(
            a / b for a, b in zip(kept[name], kept[other], strict=True)
        )
        for other in ("llama.cpp Q8_0", "transformers float32")
    }
    return {
        "name": name,
        "tokens_per_second": statistics.median(kept[name]),
        **ratios,
        "samples": kept[name],
    }
