"""Provides a small corpus of numbered sentences, and runs on it in this process or as a command."""

import functools
import json
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from spectr_jax.training import loop, metrics
from spectr_jax.training.config import train_config
from spectr_jax.training.metrics import read_metrics
from spectr_jax.training.programs import make_programs
from spectr_jax.utils.config import to_json

ROOT = pathlib.Path(__file__).parents[2]
WORDS = ["draft", "target", "token", "law", "plan", "tree", "chain", "model"]
BASE = {
    "steps": 12,
    "batch_size": 8,
    "log_every": 1,
    "eval_every": 6,
    "checkpoint_every": 4,
    "model.width": 16,
    "model.mlp": 32,
    "model.vocab_size": 320,
    "model.context": 32,
    "model.dtype": "float32",
    "optimizer.learning_rate": 0.01,
    "optimizer.warmup_steps": 4,
    "data.tokenizer": "",
}


@functools.lru_cache(maxsize=8)
def _programs(mesh, steps, *fields):
    config = train_config("draft_2m")
    config.update({"steps": steps, **{name: json.loads(field) for name, field in fields}})
    return make_programs(config, mesh)


@pytest.fixture(autouse=True)
def _little_but_training(request, monkeypatch):
    """Lets runs of one shape share their compiled programs, and skips the plots.

    Compilation and plots take half of a run's time.
    """
    if request.node.get_closest_marker("own_programs"):
        return

    def shared(config, mesh):
        names = ("model", "optimizer", "early_exit", "accumulate", "remat")
        fields = {name: json.dumps(to_json(config)[name]) for name in names}
        steps = 1 if config.optimizer.schedule == "rsqrt" else config.steps
        return _programs(mesh, steps, *fields.items())

    monkeypatch.setattr(loop, "make_programs", shared)
    monkeypatch.setattr(metrics, "plot_curves", lambda *_: None)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Returns a folder with train.txt and heldout.txt."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, count in (("train", 600), ("heldout", 40)):
        lines = [
            " ".join(rng.choice(WORDS, rng.integers(3, 12))) + f" {index}."
            for index in range(count)
        ]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def fields(corpus):
    """Returns a function that gives the flat config fields of a small run with changes."""

    def make(**changes):
        data = {
            "data.train": str(corpus / "train.txt"),
            "data.heldout": str(corpus / "heldout.txt"),
        }
        return {**BASE, **data, **changes}

    return make


@pytest.fixture(scope="session")
def config(fields):
    """Returns a function that gives the config of a small run with changes."""

    def make(**changes):
        made = train_config("draft_2m")
        made.update_from_flattened_dict(fields(**changes))
        return made

    return make


@pytest.fixture(scope="session")
def command(fields):
    """Returns a function that gives the command line of a small run with changes."""

    def make(workdir, *flags, **changes):
        given = [f"--config.{name}={value}" for name, value in fields(**changes).items()]
        entry = [sys.executable, "-m", "spectr_jax.train", "--config=configs/lm1b.py:draft_2m"]
        return [*entry, *given, f"--workdir={workdir}", *flags]

    return make


@pytest.fixture(scope="session")
def start(command):
    """Returns a function that starts a small run as a command. Its stderr goes to stdout."""

    def popen(*args, env=None, **changes):
        return subprocess.Popen(
            command(*args, **changes),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )

    return popen


@pytest.fixture(scope="session")
def losses():
    """Returns a function that reads {step: loss} from a workdir."""

    def read(workdir):
        return {
            record["step"]: record["loss"]
            for record in read_metrics(workdir / "metrics.jsonl")
            if "loss" in record
        }

    return read


@pytest.fixture(scope="session")
def wait_for_step(losses):
    """Returns a function that waits until a started run has logged a step."""

    def wait(workdir, step, process):
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and process.poll() is None:
            if (workdir / "metrics.jsonl").exists() and max(losses(workdir), default=0) >= step:
                return
            time.sleep(0.02)
        raise AssertionError(
            f"step {step} was not reached; exit status {process.poll()}: {process.communicate()[0]}"
        )

    return wait
