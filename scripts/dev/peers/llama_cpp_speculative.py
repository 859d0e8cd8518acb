"""Whether llama.cpp's two speculative programs keep the target's distribution: a chi-square test of
their first two tokens.

Each run is a process with its own seed. The distribution comes from the logits of the same file,
read through its library.
"""

import collections
import pathlib
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import scipy.stats
from peers.environment import ask
from peers.llama_cpp_build import Built

from spectr_jax.utils.errors import UserError

PROMPT, TOP_K = "We went to the", 4
PROGRAMS = {"llama-speculative-simple": ["--spec-type", "draft-simple"], "llama-speculative": []}
DRAFTS = {"the target itself": "F32", "the target without ten layers": "pruned"}


def pmf(worker: subprocess.Popen, files: Built, tokenizer: Any) -> dict[str, float]:
    """The probability of each text of the first two tokens at temperature 1, with the top 4 of each
    kept."""
    ask(worker, op="load", file=files.files["F32"], threads=1)
    prompt, made = tokenizer.encode(PROMPT), {}
    with tempfile.TemporaryDirectory() as here:
        out = str(pathlib.Path(here, "logits.npy"))

        def likeliest(row: list[int]) -> list[tuple[int, float]]:
            ask(worker, op="logits", tokens=row, out=out)
            logits = np.load(out)[-1].astype(np.float64)
            kept = np.argsort(-logits)[:TOP_K]
            weights = np.exp(logits[kept] - logits[kept[0]])
            return list(zip(kept.tolist(), weights / weights.sum(), strict=True))

        for first, p in likeliest(prompt):
            for second, q in likeliest([*prompt, first]):
                made[tokenizer.decode([first, second])] = float(p * q)
    if (
        any(one != other and one.startswith(other) for one in made for other in made)
        or len(made) < TOP_K**2
    ):
        raise UserError(
            f"the texts behind {PROMPT!r} cannot be told apart; give another prompt in the script"
        )
    return made


def outcome(command: list[str], seed: int, texts: list[str]) -> str:
    """The text that a run began with; raises `UserError` if it failed."""
    done = subprocess.run([*command, "-s", str(seed)], capture_output=True, text=True)
    found = [text for text in texts if done.stdout.partition(PROMPT)[2].startswith(text)]
    if done.returncode or len(found) != 1:
        raise UserError(f"{command[0]} printed {done.stdout[-200:]!r} and {done.stderr[-200:]!r}")
    return found[0]


def compare_speculative(
    worker: subprocess.Popen, files: Built, tokenizer: Any, runs: int
) -> dict[str, Any]:
    """The p-value of each program with each draft; tokens of small probability are one cell."""
    expected, rows = pmf(worker, files, tokenizer), []
    texts = sorted(expected, key=lambda text: -expected[text])
    seeds = np.random.default_rng(0).integers(1, 2**31 - 1, (len(PROGRAMS) * len(DRAFTS), runs))
    common = [
        "-p",
        PROMPT,
        "-n",
        "2",
        "--temp",
        "1",
        "--top-k",
        str(TOP_K),
        "--samplers",
        "top_k;temperature",
    ]
    common += [
        "-c",
        "128",
        "-t",
        "1",
        "-td",
        "1",
        "--spec-draft-n-max",
        "2",
        "-m",
        files.files["F32"],
    ]
    common += [
        "-fa",
        "off",
        "-ctk",
        "f32",
        "-ctv",
        "f32",
    ]  # As the library is called: near-ties are cut as there.
    cases = [(program, draft) for program in PROGRAMS for draft in DRAFTS]
    for (program, draft), own in zip(cases, seeds.tolist(), strict=True):
        command = [
            str(files.programs / program),
            *common,
            *PROGRAMS[program],
            "-md",
            files.files[DRAFTS[draft]],
        ]
        with ThreadPoolExecutor(2) as pool:
            counts = collections.Counter(
                pool.map(lambda seed, command=command: outcome(command, seed, texts), own)
            )
        rows.append(
            {"program": program, "draft": draft, "runs": runs}
            | chi_square(counts, expected, texts, runs)
        )
        print(rows[-1], flush=True)
    return {"rows": rows, "law": expected, "prompt": PROMPT, "top_k": TOP_K}


def chi_square(
    counts: collections.Counter, expected: dict[str, float], texts: list[str], runs: int
) -> dict[str, Any]:
    """The p-value of counts, with the texts of fewer than five expected runs in one cell."""
    large = [text for text in texts if expected[text] * runs >= 5]
    seen = [counts[text] for text in large]
    pmf_ = [expected[text] * runs for text in large]
    if len(large) < len(texts):
        seen, pmf_ = [*seen, runs - sum(seen)], [*pmf_, runs - sum(pmf_)]
    statistic, p_value = scipy.stats.chisquare(seen, pmf_)
    return {
        "p_value": float(p_value),
        "statistic": float(statistic),
        "cells": len(seen),
        "seen": seen,
        "expected": pmf_,
    }
