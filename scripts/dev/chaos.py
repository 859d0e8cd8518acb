"""Kills a training run at random moments and compares its end with that of a run that was left alone.

    python scripts/dev/chaos.py [--workdir=runs/chaos] [--kills=20] [--steps=400] [--seed=0]

A run of the 2M draft on sentences made here, whose last word is their number. It is killed with `kill -9`, while it starts,
trains, evaluates or saves, and started again with the same command, until it is done. Every batch that was trained on is
recorded. In the end parameters and optimizer must be those of the run without kills, to the last bit; a step that was taken
again must have had the same sentences; and of the steps together no sentence of an epoch may be missing or there twice.
"""

import collections
import hashlib
import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import flags

from spectr_jax import cli, sharding
from spectr_jax.config import lm1b_config
from spectr_jax.data.batches import PACKING_BINS
from spectr_jax.data.tokenizer import Tokenizer
from spectr_jax.errors import UserError
from spectr_jax.files import write_json
from spectr_jax.models.weights import named_leaves
from spectr_jax.training import loop

_WORKDIR = flags.DEFINE_string("workdir", "runs/chaos", "Where the two runs go; emptied first.")
_KILLS = flags.DEFINE_integer("kills", 20, "How often the run is killed.", lower_bound=0)
_STEPS = flags.DEFINE_integer("steps", 400, "Of each run.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the moments.")
_RUN = flags.DEFINE_string("run", "", "Used by the script itself: train in this folder and record the batches.")

SENTENCES, STREAMS, ROWS = 2_400, 2, 8
MARGIN = 5
"""Steps at the start and at the end in which the run is not killed."""
STARTING = 0.3
"""The share of kills that fall into the start."""
WORDS = "draft target token law plan tree chain model accepts emits every some large small of the".split()  # noqa: SIM905


def main():
    folder = pathlib.Path(_WORKDIR.value)
    if _RUN.value:
        train_and_record(folder, pathlib.Path(_RUN.value))
        return
    if _STEPS.value < _KILLS.value + 2 * MARGIN:
        raise UserError(
            f"--steps={_STEPS.value} is too few for --kills={_KILLS.value}; give {_KILLS.value + 2 * MARGIN} or more"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_corpus(folder)
    for name, moments in (("whole", []), ("killed", kill_moments())):
        started = time.monotonic()
        run(folder, folder / name, moments)
        print(f"{name}: {_STEPS.value} steps, {len(moments)} kills, {time.monotonic() - started:.0f} s", flush=True)
    ours, theirs = (json.loads((folder / name / "final.json").read_text()) for name in ("killed", "whole"))
    differing = [name for name in theirs if ours[name] != theirs[name]]
    print(f"{len(theirs)} arrays of parameters and optimizer, of which {len(differing)} differ {differing[:3] or ''}")
    problems = [f"{name}: {problem}" for name in ("whole", "killed") for problem in check_sentences(folder / name)]
    if recorded(folder / "killed") != recorded(folder / "whole"):
        problems.append("the two runs trained on other batches")
    print("\n".join(problems) or "no sentence of an epoch missing or twice, and the same batches in both runs")
    if differing or problems:
        sys.exit(1)


def kill_moments() -> list[tuple[str, float]]:
    """In order: so many seconds after the start, or soon after a step."""
    rng = random.Random(_SEED.value)
    steps = sorted(rng.sample(range(MARGIN, _STEPS.value - MARGIN), _KILLS.value))
    return [("seconds", rng.uniform(0, 6)) if rng.random() < STARTING else ("step", step) for step in steps]


def config(folder: pathlib.Path):
    """Two passes over the corpus and more, a checkpoint every 10 steps."""
    made = lm1b_config("draft_2m")
    made.update({"steps": _STEPS.value, "batch_size": ROWS, "log_every": 5, "eval_every": 50, "checkpoint_every": 10})
    made.model.update({"vocab_size": 400, "dtype": "float32"})
    made.data.update({"train": str(folder / "train.txt"), "heldout": str(folder / "heldout.txt"), "streams": STREAMS})
    made.data.tokenizer = str(folder / "tokenizer.model")
    made.optimizer.warmup_steps = 50
    return made


def write_corpus(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(_SEED.value)
    for name, first, count in (("train", 0, SENTENCES), ("heldout", SENTENCES, 50)):
        lines = [" ".join(rng.choice(WORDS, rng.integers(4, 12))) + f" {index}" for index in range(first, first + count)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")


def train_and_record(folder: pathlib.Path, workdir: pathlib.Path) -> None:
    """The child: a run as `spectr_jax.train` makes it, that writes down the sentences of each batch before its step."""
    saved = [int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]
    step = max(saved, default=0)
    put = sharding.put_rows
    tokenizer: list[Tokenizer] = []

    with (workdir / "batches.jsonl").open("a") as file:

        def put_and_record(mesh, batch):
            nonlocal step
            if not tokenizer:
                tokenizer.append(Tokenizer(workdir / "tokenizer.model"))
                file.write("\n")
            numbers = sentence_numbers(batch, tokenizer[0])
            if numbers[0] < SENTENCES:  # Not held out.
                step += 1
                print(json.dumps({"step": step, "sentences": numbers}), file=file, flush=True)
            return put(mesh, batch)

        sharding.put_rows = put_and_record
        state = loop.train(config(folder), workdir)
    leaves = named_leaves(state)
    leaves["key"] = jax.random.key_data(leaves["key"])
    digests = {name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for name, leaf in leaves.items()}
    write_json(workdir / "final.json", digests)


def sentence_numbers(batch: dict[str, np.ndarray], tokenizer: Tokenizer) -> list[int]:
    """The number that ends each sentence of a packed batch."""
    found = []
    for targets, segments in zip(batch["targets"], batch["segments"], strict=True):
        for segment in range(1, segments.max() + 1):
            found.append(int(tokenizer.decode(targets[segments == segment]).split()[-1]))
    return found


def run(folder: pathlib.Path, workdir: pathlib.Path, moments: list[tuple[str, float]]) -> None:
    """Starts the run, kills it at each moment and starts it again, and lets the last one finish."""
    workdir.mkdir()
    rng = random.Random(_SEED.value + 1)
    for number, (kind, moment) in enumerate(moments, 1):
        process = start(folder, workdir)
        if kind == "seconds":
            time.sleep(moment)
        while kind == "step" and process.poll() is None and last_step(workdir) < moment:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            sys.exit(f"the run ended by itself before kill {number}; see {workdir / 'log.txt'}")
        names = sorted(path.name for path in (workdir / "checkpoints").glob("*"))
        print(f"kill {number}, {kind} {moment:.1f}: at step {last_step(workdir)}; {' '.join(names)}", flush=True)
    if status := start(folder, workdir).wait():
        sys.exit(f"the run ended with status {status}; see {workdir / 'log.txt'}")


def start(folder: pathlib.Path, workdir: pathlib.Path) -> subprocess.Popen:
    ours = [f"--workdir={folder}", f"--run={workdir}", f"--steps={_STEPS.value}", f"--seed={_SEED.value}"]
    with (workdir / "log.txt").open("a") as log:
        return subprocess.Popen([sys.executable, __file__, *ours], stdout=log, stderr=log)


def records(workdir: pathlib.Path) -> list[dict[str, Any]]:
    path = workdir / "batches.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = []
    for line in lines:  # A kill may cut a line short, and the next start goes on behind it.
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def last_step(workdir: pathlib.Path) -> int:
    found = records(workdir)
    return found[-1]["step"] if found else 0


def recorded(workdir: pathlib.Path) -> dict[int, list[int]]:
    """The sentences of each step, by its last time."""
    return {record["step"]: record["sentences"] for record in records(workdir)}


def check_sentences(workdir: pathlib.Path) -> list[str]:
    """What is wrong with the sentences that the run was trained on."""
    problems = []
    batches: dict[int, list[int]] = {}
    for record in records(workdir):
        if batches.setdefault(record["step"], record["sentences"]) != record["sentences"]:
            problems.append(f"step {record['step']} had other sentences when it was taken again")
    if sorted(batches) != list(range(1, _STEPS.value + 1)):
        problems.append(f"{_STEPS.value - len(batches)} steps have no batch")
    # Packing mixes the sentences of so many rows: up to there each was seen n or n + 1 times.
    whole = _STEPS.value * (ROWS // STREAMS) // PACKING_BINS * PACKING_BINS // (ROWS // STREAMS)
    for stream in range(STREAMS):
        seen = collections.Counter(
            number for step in range(1, whole + 1) for number in batches.get(step, ()) if number % STREAMS == stream
        )
        times = [seen[number] for number in range(stream, SENTENCES, STREAMS)]
        print(f"{workdir.name}, stream {stream}: each of {len(times)} sentences {min(times)} or {max(times)} times")
        if max(times) - min(times) > 1:
            problems.append(f"stream {stream}: a sentence {min(times)} times, another {max(times)} times")
    return problems


if __name__ == "__main__":
    cli.run(main, output=_WORKDIR)
