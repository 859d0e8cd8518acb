"""Runs scripts/train_ladder.py at toy size: it is stopped, two stages fail, and it resumes.

The stages `trees` and `auto_32` are made to fail after their flags are checked. They take long, and
other files test them.
"""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time

import pytest

from helpers import ROOT
from spectr_jax.loading.by_name import load
from spectr_jax.training.metrics import read_metrics

TRAININGS = ["train_2m", "train_6m", "train_20m", "train_97m"]
MODELS = ["draft_2m", "draft_6m", "draft_20m", "target_97m"]
TABLES = {
    "table2": "tokens_per_call",
    "latency": "latency",
    "quality": "quality",
    "figures": "spectr_figure_5",
}
FAILING = {"auto_32": "auto", "trees": "trees"}
WORDS = ["draft", "target", "token", "plan", "tree", "chain", "model", "prefix", "accepts", "emits"]
SHAPE = {
    "model.width": 16,
    "model.mlp": 32,
    "model.heads": 2,
    "model.layers": 1,
    "model.vocab_size": 320,
}
TRAINING = {
    **SHAPE,
    "model.context": 32,
    "steps": 20,
    "batch_size": 8,
    "optimizer.warmup_steps": 4,
    "log_every": 5,
}
DECODING = {
    "prompt_tokens": 3,
    "max_new_tokens": 5,
    "seeds": (0, 1),
    "num_prompts": 5,
    "batch_size": 4,
}
PHASES = {"methods": ("spectr",), "num_drafts": 2, "phase_batch_sizes": (1,)}
TOY = {
    "train": {**TRAINING, "eval_every": 10, "checkpoint_every": 10},
    "table2": {"num_drafts": (1,), "draft_lengths": (2,), "optimal_acceptance": False},
    "latency": {**PHASES, "runs": 2, "context": 4, "lengths": (2,), "batch_sizes": (1,)},
    "quality": {"sentences": 60, "dtypes": ("float32",)},
    "trees": {"sizes": (1,), "draft_length": 1, "extra_trees": ("1",), "exit_layer": 0},
    "auto_1,auto_32": {"candidates": ("block chain:1",)},
    "table2,trees,auto_1,auto_32": DECODING,
}

# Runs the script. Forks the program of each stage, because importing JAX in each takes most of the
# time.
FORKING = """
import importlib, os, runpy, signal, subprocess, sys
from absl import flags
sys.path.insert(0, "tests")
import fork_server

class Forked:
    def __init__(self, command):
        self.pid = os.fork()
        if not self.pid:
            subprocess.Popen = popen
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for flag in flags.FLAGS.get_flags_for_module(sys.argv[0]):
                delattr(flags.FLAGS, flag.name)
            fork_server.become(command[2], command[3:], {}, "/dev/stdout", "/dev/stderr")
    def terminate(self):
        os.kill(self.pid, signal.SIGTERM)
    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

for module in ("training.loop", "experiments.figures.acceptance", "data.packed"):
    importlib.import_module("spectr_jax." + module)
for experiment in ("auto", "latency", "quality", "tokens_per_call", "trees"):
    importlib.import_module("spectr_jax.experiments." + experiment)
popen, subprocess.Popen = subprocess.Popen, Forked
fork_server.SECONDS = 600
sys.argv[0] = "scripts/train_ladder.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def ladder(tmp_path):
    """Returns a function that starts the script on generated sentences with more `--stage_flags`.

    stderr goes to stdout.
    """
    for name, count in (("train", 900), ("heldout", 60)):
        draw = random.Random(name)
        lines = [
            " ".join(draw.choices(WORDS, k=draw.randint(3, 11))) + f" {index}."
            for index in range(count)
        ]
        (tmp_path / f"{name}-0.txt").write_text("\n".join(lines) + "\n")
    more = [
        f"{names}: {shlex.join(f'--config.{key}={value}' for key, value in toy.items())}"
        for names, toy in TOY.items()
    ]
    more += [
        "pack: --vocab_size=320 --length=32",
        "figures: --config.draws=200 --config.prompt=draft",
        "export: --dtype=int8",
    ]

    def start(*further, only=()):
        command = [sys.executable, "-c", FORKING, f"--workdir={tmp_path}/work"]
        command += [f"--data={tmp_path}/train-*.txt", f"--heldout={tmp_path}/heldout-*"]
        command += [
            f"--only={','.join(only)}",
            *(f"--stage_flags={flags}" for flags in (*more, *further)),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OPENBLAS_NUM_THREADS": "1",
        }  # A process that forks must have one thread.
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


RSQRT = "train_20m: --config.optimizer.schedule=rsqrt"
"""With other schedules another number of steps would make the learning rate jump."""


def _started_stages(output):
    """Returns the names of the stages that were started, in order."""
    lines = [line.removeprefix("== ") for line in output.splitlines() if line.startswith("== ")]
    return [line for line in lines if " " not in line]


@pytest.mark.slow
@pytest.mark.xdist_group("ladder")
def test_the_ladder_resumes_after_a_stop_and_failed_stages(ladder, tmp_path):
    work = tmp_path / "work"
    process = ladder(f"{RSQRT} --config.steps=100000")
    deadline = time.monotonic() + 240
    while (
        not (work / "draft_20m/metrics.jsonl").exists()
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75 and output.endswith(
        "stopped at stage train_20m; the same command resumes\n"
    ), output
    assert _started_stages(output) == ["pack", "train_2m", "train_6m", "train_20m"]
    assert sorted(path.name for path in work.glob("ladder/*.safetensors")) == [
        "draft_2m.safetensors",
        "draft_6m.safetensors",
    ]
    saved = int(output.split("stopped and saved at step ")[1].split()[0])

    for stage, table in FAILING.items():
        other_table = work / f"results/{stage}/{table}.json"
        other_table.parent.mkdir(parents=True)
        other_table.write_text('{"config_hash": "of another"}')
    last = f"{RSQRT} --config.steps={saved + 10}"
    # auto_1 is left out, because it is auto_32 in smaller batches.
    rest = [*TRAININGS, *FAILING, *TABLES]
    output, _ = (process := ladder(last, only=rest)).communicate(timeout=500)
    assert process.returncode == 2 and output.endswith("run the same command again\n"), output
    assert "error: failed: auto_32, trees;" in output and f"from step {saved}\n" in output
    assert sorted(_started_stages(output)) == sorted(rest)
    assert output.count("finished: 20 steps") == 2
    written = {
        file: file.read_bytes() for name in TABLES for file in (work / "results" / name).iterdir()
    }
    again = ["pack", *TRAININGS, *TABLES]
    output, _ = (process := ladder(last, only=again)).communicate(timeout=120)
    assert process.returncode == 0 and _started_stages(output) == again, output
    assert output.count(" is finished: commit ") == len(TABLES) and "is packed already" in output
    assert output.count("\nfinished: ") == len(MODELS)
    assert all(file.read_bytes() == content for file, content in written.items())

    for name in MODELS:
        steps = [record["step"] for record in read_metrics(work / f"{name}/metrics.jsonl")]
        assert steps[-1] == (saved + 10 if name == "draft_20m" else 20)
        assert load(str(work / "ladder" / name)).model.vocab_size == 320
    made = {
        stage: json.loads((work / f"results/{stage}/{table}.json").read_text())
        for stage, table in TABLES.items()
    }
    assert [row["algorithm"] for row in made["table2"]["rows"]] == [
        "baseline",
        *["speculative"] * 3,
    ]
    assert made["figures"]["settings"]["draft"].endswith("ladder/draft_6m")
    for row, name in zip(
        made["quality"]["rows"], reversed(MODELS), strict=True
    ):  # The int8 model's score is close to that of the trained model.
        bits = row["scores"]["float32"]["eval_bits_per_character"]
        trained = [
            record
            for record in read_metrics(work / f"{name}/metrics.jsonl")
            if "eval_bits_per_character" in record
        ]
        assert row["model"] == name and bits != trained[-1][
            "eval_bits_per_character"
        ] == pytest.approx(bits, rel=0.005)
