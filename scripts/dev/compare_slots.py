"""Compares `generate_all` with batches in the order of the file: tokens per second, idle slots.

    python scripts/dev/compare_slots.py --questions=question.jsonl --target=smollm2 --slots=8 \\
        --workdir=results/slots/smollm2
    python scripts/dev/compare_slots.py --lines=sentences.txt --target=20m --draft=2m --method=block \\
        --slots=32 --workdir=results/slots/20m

Both decode the same prompts, with EOS, in turns. Prompts are the first messages of questions in
Spec-Bench's format, or lines of a text file. No compilation is timed.
"""

import pathlib
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from spectr_jax.data.questions import read_questions, spread
from spectr_jax.decoding import Policy, generate_all, get_method
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.decoding.request import padded_length
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.spec_bench import method_of
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import freeze
from spectr_jax.utils import cli

_QUESTIONS = flags.DEFINE_string("questions", None, "Questions in Spec-Bench's format.")
_PER_TASK = flags.DEFINE_integer("questions_per_task", 0, "Questions of each task; 0 for all.")
_LINES = flags.DEFINE_string("lines", None, "A text file with one prompt per line.")
_TARGET = flags.DEFINE_string("target", "smollm2", "The target.")
_DRAFT = flags.DEFINE_string("draft", None, "The draft model or table.")
_METHODS = flags.DEFINE_multi_string("method", ["baseline"], "Such as 'recycle 2,1'.")
_SLOTS = flags.DEFINE_integer("slots", 8, "Sequences at the same time.")
_NEW = flags.DEFINE_integer("max_new_tokens", 256, "New tokens of each sequence at most.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "The temperature.")
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Runs of each.")
_WORKDIR = flags.DEFINE_string("workdir", "results/slots", "Where the table goes.")

KEY = jax.random.key(0)


def prompts_of(tokenizer) -> list[list[int]]:
    """Returns the prompts in the order of their file."""
    if _QUESTIONS.value:
        questions = spread(read_questions(_QUESTIONS.value), _PER_TASK.value)
        return [tokenizer.chat([{"role": "user", "content": each.turns[0]}]) for each in questions]
    lines = pathlib.Path(_LINES.value).read_text().splitlines()
    return [tokenizer.prompt(line) for line in lines if line.strip()]


def in_batches(decoder, prompts, policy, compile_only: bool = False) -> dict[str, Any]:
    """Decodes batch after batch; returns seconds, new tokens, calls, and calls of all slots."""
    B = _SLOTS.value
    totals = {"tokens": 0, "calls": 0, "slot_calls": 0}
    started = time.perf_counter()
    shapes = set()
    for start in range(0, len(prompts), B):
        batch = prompts[start : start + B]
        lengths = np.array([len(prompt) for prompt in batch])
        rows = np.zeros((len(batch), lengths.max()), np.int32)
        for row, prompt in zip(rows, batch, strict=True):
            row[: len(prompt)] = prompt
        keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, start + np.arange(len(batch)))
        arguments: Any = keys, *decoder, rows, lengths, _NEW.value, policy
        shape = len(batch), padded_length(int(lengths.max()))
        if compile_only and shape not in shapes:
            lower(*arguments).compile()
        shapes.add(shape)
        if not compile_only:
            out = jax.device_get(generate(*arguments))
            totals["tokens"] += int((out.lengths - lengths).sum())
            totals["calls"] += int(out.target_calls.sum())
            totals["slot_calls"] += len(batch) * int(out.target_calls.max())
    return totals | {"seconds": time.perf_counter() - started, "programs": len(shapes)}


def in_slots(decoder, prompts, policy, skip=()) -> dict[str, Any]:
    """Decodes through slots; returns what `in_batches` does."""
    totals = {"tokens": 0, "calls": 0, "slot_calls": 0}
    started = time.perf_counter()
    for done in generate_all(
        KEY, *decoder, prompts, _NEW.value, _SLOTS.value, policy=policy, skip=skip
    ):
        totals["tokens"] += len(done.tokens) - done.prompt_length
        totals["calls"] += done.target_calls
        totals["slot_calls"] = _SLOTS.value * done.batch_calls
    return totals | {"seconds": time.perf_counter() - started, "programs": 2}


def measure(name: str, target, draft, prompts, policy) -> dict[str, Any]:
    """Returns the totals of all runs of one method."""
    method = method_of(name) if name != "baseline" else get_method(name)
    decoder = method, target, draft if method.takes_draft else None
    in_batches(decoder, prompts, policy, compile_only=True)
    in_slots(decoder, prompts, policy, skip=range(_SLOTS.value, len(prompts)))
    runs: dict[str, list[dict[str, Any]]] = {"batches": [], "slots": []}
    for _ in range(_ROUNDS.value):
        for label, run in (("batches", in_batches), ("slots", in_slots)):
            runs[label].append(run(decoder, prompts, policy))
            print(name, label, runs[label][-1], flush=True)
    same = {(run["tokens"], run["calls"]) for each in runs.values() for run in each}
    return {"method": name, "equal": len(same) == 1, **runs}


def main() -> None:
    """Writes the table."""
    target, drafts = load_pair(_TARGET.value, (_DRAFT.value,) if _DRAFT.value else (), "int8")
    prompts = prompts_of(target.tokenizer)
    policy = Policy(_TEMPERATURE.value, eos=target.tokenizer.eos)
    models = freeze(target), freeze(drafts[0]) if drafts else None
    rows = [measure(name, *models, prompts, policy) for name in _METHODS.value]
    cells = []
    for row in rows:
        speeds = {
            label: [run["tokens"] / run["seconds"] for run in row[label]]
            for label in ("batches", "slots")
        }
        ratio = np.median(np.divide(speeds["slots"], speeds["batches"]))
        idle = [1 - row[label][0]["calls"] / row[label][0]["slot_calls"] for label in speeds]
        new = row["slots"][0]["tokens"] / row["slots"][0]["calls"]
        cells.append(
            [row["method"], f"{new:.2f}"]
            + [f"{np.median(each):,.0f}" for each in speeds.values()]
            + [f"{ratio:.2f}", *(f"{share:.1%}" for share in idle)]
        )
    header = ["Method", "Tokens/call", "Batches, tokens/s", "Slots, tokens/s", "Ratio"]
    table = report.markdown_table([*header, "Idle in batches", "Idle in slots"], cells)
    lengths = [len(prompt) for prompt in prompts]
    result = {**report.provenance(), "prompts": len(prompts), "rows": rows}
    notes = [
        f"{len(prompts):,} prompts of {min(lengths)} to {max(lengths):,} tokens (median "
        f"{np.median(lengths):.0f}), at most {_NEW.value} new tokens, EOS, temperature "
        f"{_TEMPERATURE.value:g}, int8. {_SLOTS.value} slots against batches of {_SLOTS.value} in "
        f"the order of the file; {_ROUNDS.value} runs of each in turns. The ratio is the median of "
        "the ratios of runs. Idle is the share of calls of a slot whose sequence had ended.",
        report.provenance_line(result),
    ]
    title = f"A list of prompts through slots, {target.name}"
    report.write(pathlib.Path(_WORKDIR.value), "slots", result, report.page(title, table, notes))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
