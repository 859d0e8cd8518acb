"""Compares `generate_all` with batches in the order of the file: tokens per second, idle slots.

    python scripts/dev/compare_slots.py --questions=question.jsonl --target=smollm2 --slots=8 \\
        --workdir=results/slots/smollm2
    python scripts/dev/compare_slots.py --lines=sentences.txt --target=20m --draft=2m \\
        --method='block chain:2' --slots=32 --max_new_tokens=96 --workdir=results/slots/20m

Both decode the same prompts, with EOS, in turns. Prompts are the first messages of questions in
Spec-Bench's format, or lines of a text file. No compilation is timed.
"""

import operator
import pathlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import flags

from spectr_jax.data.questions import read_questions, spread
from spectr_jax.decoding import Policy, generate_all, get_method, slots
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.planning.on_tree import method_of
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.frozen import freeze
from spectr_jax.sampling import prompts
from spectr_jax.utils import cli
from spectr_jax.utils.errors import UserError

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
    return [tokenizer.prompt(line) for line in prompts.from_file(_LINES.value).values()]


def batches(decoder, rows, policy) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of `generate` for each batch."""
    for start in range(0, len(rows), _SLOTS.value):
        batch = rows[start : start + _SLOTS.value]
        lengths = np.array([len(prompt) for prompt in batch])
        tokens = np.zeros((len(batch), lengths.max()), np.int32)
        for row, prompt in zip(tokens, batch, strict=True):
            row[: len(prompt)] = prompt
        keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, start + np.arange(len(batch)))
        yield keys, *decoder, tokens, lengths, _NEW.value, policy


def in_batches(decoder, rows, policy) -> dict[str, Any]:
    """Decodes batch after batch; returns the new tokens, and calls: of sequences and of slots."""
    new, calls, slot_calls = [], 0, 0
    for arguments in batches(decoder, rows, policy):
        out, lengths = jax.device_get(generate(*arguments)), arguments[5]
        new += [
            row[start:end].tolist()
            for row, start, end in zip(out.tokens, lengths, out.lengths, strict=True)
        ]
        calls += int(out.target_calls.sum())
        slot_calls += len(lengths) * int(out.target_calls.max())
    return {"new": new, "calls": calls, "slot_calls": slot_calls}


def in_slots(decoder, rows, policy) -> dict[str, Any]:
    """Decodes through slots; returns what `in_batches` does."""
    new, calls = [[]] * len(rows), 0
    with mock.patch.object(slots, "advance", wraps=slots.advance) as advance:
        for done in generate_all(
            KEY, *decoder, rows, _NEW.value, policy=policy, slots=_SLOTS.value
        ):
            new[done.index] = done.tokens[done.prompt_length :].tolist()
            calls += done.target_calls
    programs = len(advance.mock_calls) * advance.mock_calls[0].args[2]
    return {"new": new, "calls": calls, "slot_calls": _SLOTS.value * programs}


def measure(name: str, target, draft, rows, policy) -> dict[str, Any]:
    """Returns the runs of one method, and whether all emitted the same sequences."""
    method = method_of(name) if name != "baseline" else get_method(name)
    decoder = method, target, draft if method.takes_draft else None
    for arguments in batches(decoder, rows, policy):
        lower(*arguments).compile()  # JAX keeps the programs.
    # As many prompts as slots: of fewer, `generate_all` makes a program of fewer slots.
    in_slots(decoder, [max(rows, key=len), *[rows[0]] * (_SLOTS.value - 1)], policy)
    runs: dict[str, list[dict[str, Any]]] = {"batches": [], "slots": []}
    sequences = []
    for _ in range(_ROUNDS.value):
        for label, run in (("batches", in_batches), ("slots", in_slots)):
            started = time.perf_counter()
            counts = run(decoder, rows, policy)
            seconds = time.perf_counter() - started
            sequences.append(counts.pop("new"))
            tokens = sum(map(len, sequences[-1]))
            runs[label].append({"tokens": tokens, "seconds": seconds, **counts})
            print(name, label, runs[label][-1], flush=True)
    equal = [sum(map(operator.eq, sequences[0], each)) for each in sequences]
    return {"method": name, "equal": min(equal), **runs}


def main() -> None:
    """Writes the table."""
    if (_QUESTIONS.value is None) == (_LINES.value is None):
        raise UserError("give one of --questions and --lines")
    target, drafts = load_pair(_TARGET.value, (_DRAFT.value,) if _DRAFT.value else (), "int8")
    given = prompts_of(target.tokenizer)
    policy = Policy(_TEMPERATURE.value, eos=target.tokenizer.eos)
    models = freeze(target), freeze(drafts[0]) if drafts else None
    rows = [measure(name, *models, given, policy) for name in _METHODS.value]
    cells = []
    for row in rows:
        speed = {
            label: [run["tokens"] / run["seconds"] for run in row[label]]
            for label in ("batches", "slots")
        }
        row["ratio"] = float(np.median(np.divide(speed["slots"], speed["batches"])))
        row["idle"] = {
            label: 1 - row[label][0]["calls"] / row[label][0]["slot_calls"] for label in speed
        }
        new = row["slots"][0]["tokens"] / row["slots"][0]["calls"]
        cells.append(
            [row["method"], f"{new:.2f}"]
            + [f"{np.median(each):,.0f}" for each in speed.values()]
            + [f"{row['ratio']:.2f}", *(f"{share:.1%}" for share in row["idle"].values())]
        )
    header = ["Method", "Tokens/call", "Batches, tokens/s", "Slots, tokens/s", "Ratio"]
    table = report.markdown_table([*header, "Idle in batches", "Idle in slots"], cells)
    lengths = [len(prompt) for prompt in given]
    result = {**report.provenance(), "prompts": len(given), "rows": rows}
    notes = [
        f"{len(given):,} prompts of {min(lengths)} to {max(lengths):,} tokens (median "
        f"{np.median(lengths):.0f}), at most {_NEW.value} new tokens, EOS, temperature "
        f"{_TEMPERATURE.value:g}, int8. {_SLOTS.value} slots against batches of {_SLOTS.value} in "
        f"the order of the file; {_ROUNDS.value} run{'s' * (_ROUNDS.value > 1)} of each in turns, "
        "and the median ratio. Idle is the share of calls of a slot whose sequence had ended. Equal: "
        + ", ".join(f"{row['equal']} of {len(given)}" for row in rows)
        + " sequences.",
        report.provenance_line(result),
    ]
    title = f"A list of prompts through slots, {target.name}"
    report.write(pathlib.Path(_WORKDIR.value), "slots", result, report.page(title, table, notes))


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
