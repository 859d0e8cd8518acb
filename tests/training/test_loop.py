"""Training runs, as a user starts them; the restart test kills a process for real."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.config import train_config
from spectr_jax.errors import UserError
from spectr_jax.experiments.loading import load_trained
from spectr_jax.models.transformer import causal
from spectr_jax.training.loop import train
from spectr_jax.training.metrics import read_metrics
from spectr_jax.training.step import summed_loss

ROOT = pathlib.Path(__file__).parents[2]
WORDS = ["draft", "target", "token", "law", "plan", "tree", "chain", "model"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    for name, count in (("train", 600), ("heldout", 40)):
        lines = [" ".join(rng.choice(WORDS, rng.integers(3, 12))) + "." for _ in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder


def _config(corpus, **changes):
    config = train_config("draft_2m")
    config.update(
        {
            "steps": 12,
            "batch_size": 4,
            "log_every": 1,
            "eval_every": 6,
            "checkpoint_every": 4,
            "model": {"width": 16, "mlp": 32, "vocab_size": 280, "context": 32},
            "data": {"train": str(corpus / "train.txt"), "heldout": str(corpus / "heldout.txt")},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 4},
        }
    )
    config.update_from_flattened_dict(changes)
    return config


def _losses(workdir):
    return {record["step"]: record["loss"] for record in read_metrics(workdir / "metrics.jsonl") if "loss" in record}


def test_a_run_learns_and_leaves_its_record(corpus, tmp_path):
    train(_config(corpus, steps=60, eval_every=30, checkpoint_every=30), tmp_path / "run")
    losses = _losses(tmp_path / "run")
    assert list(losses) == list(range(1, 61))
    assert losses[60] < losses[1] - 1
    evaluated = [record for record in read_metrics(tmp_path / "run/metrics.jsonl") if "eval_nats_per_token" in record]
    assert [record["step"] for record in evaluated] == [30, 60]
    assert evaluated[1]["eval_bits_per_character"] < evaluated[0]["eval_bits_per_character"]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.json",
        "tokenizer.model",
        "metrics.jsonl",
        "loss.png",
        "checkpoints",
    }
    assert load_trained(str(tmp_path / "run")).model.vocab_size == 280


def test_an_early_exit_is_trained_beside_the_model(corpus, tmp_path):
    changes = {"steps": 40, "eval_every": 40, "checkpoint_every": 40, "model.layers": 2}
    train(_config(corpus, **changes, **{"early_exit.layer": 1}), tmp_path / "exit")
    train(_config(corpus, **changes), tmp_path / "none")
    logged = [record for record in read_metrics(tmp_path / "exit/metrics.jsonl") if "exit_loss" in record]
    assert len(logged) == 40 and logged[-1]["exit_loss"] < logged[0]["exit_loss"] - 0.5
    assert not any("exit_loss" in record for record in read_metrics(tmp_path / "none/metrics.jsonl"))
    behind_one = {}
    for name in ("exit", "none"):
        model = load_trained(str(tmp_path / name)).model
        sentences = (corpus / "heldout.txt").read_text().splitlines()
        tokens = jnp.asarray([load_trained(str(tmp_path / name)).tokenizer.encode(" ".join(sentences))[:20]])
        positions = jnp.arange(19)[None]
        segments = jnp.ones_like(positions)
        batch = {"inputs": tokens[:, :-1], "positions": positions, "segments": segments, "targets": tokens[:, 1:]}
        nats, exit_nats, count = summed_loss(model, batch, exit_layer=1)
        for layers, ours in ((2, nats), (1, exit_nats)):
            logits, _ = model.extend(batch["inputs"], positions, causal(segments), layers=layers)
            theirs = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1).sum()
            assert float(ours) == pytest.approx(float(theirs), rel=1e-4)
        assert count == 19
        behind_one[name] = float(exit_nats)
        evaluated = read_metrics(tmp_path / name / "metrics.jsonl")[-1]
        assert ("eval_exit_nats_per_token" in evaluated) == (name == "exit")
    assert behind_one["exit"] < behind_one["none"]


def test_stopping_and_going_on_is_the_same_run(corpus, tmp_path):
    """The second start has more steps to take, a new process in all but name."""
    whole = train(_config(corpus), tmp_path / "whole")
    train(_config(corpus, steps=7), tmp_path / "parts")
    resumed = train(_config(corpus), tmp_path / "parts")
    assert _losses(tmp_path / "parts") == _losses(tmp_path / "whole")
    for ours, theirs in zip(jax.tree.leaves(resumed.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def _command(corpus, workdir, **flags):
    flat = {
        "steps": 200,
        "batch_size": 4,
        "log_every": 1,
        "eval_every": 100,
        "checkpoint_every": 20,
        "model.width": 16,
        "model.mlp": 32,
        "model.vocab_size": 280,
        "model.context": 32,
        "data.tokenizer": "",
        "data.train": corpus / "train.txt",
        "data.heldout": corpus / "heldout.txt",
        "model.dtype": "float32",
        **flags,
    }
    config = ["--config=configs/lm1b.py:draft_2m", *(f"--config.{name}={value}" for name, value in flat.items())]
    return [sys.executable, "-m", "spectr_jax.train", *config, f"--workdir={workdir}"]


def _wait_for_step(workdir, step, process):
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and process.poll() is None:
        if (workdir / "metrics.jsonl").exists() and max(_losses(workdir), default=0) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached; exit status {process.poll()}")


def test_kill_and_resume_gives_the_uninterrupted_curve(corpus, tmp_path):
    """200 steps with kill -9 in the middle, against 200 steps in one go."""
    subprocess.run(_command(corpus, tmp_path / "whole"), cwd=ROOT, check=True, capture_output=True)
    process = subprocess.Popen(_command(corpus, tmp_path / "killed"), cwd=ROOT, stderr=subprocess.DEVNULL)
    _wait_for_step(tmp_path / "killed", 90, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert max(_losses(tmp_path / "killed")) < 200
    subprocess.run(_command(corpus, tmp_path / "killed"), cwd=ROOT, check=True, capture_output=True)
    whole = _losses(tmp_path / "whole")
    assert list(whole) == list(range(1, 201))
    assert _losses(tmp_path / "killed") == whole


def test_ctrl_c_saves(corpus, tmp_path):
    process = subprocess.Popen(
        _command(corpus, tmp_path / "run", steps=100_000), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _wait_for_step(tmp_path / "run", 10, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=120) == 0
    saved = max(int(path.name) for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit())
    assert saved == max(_losses(tmp_path / "run"))


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path):
    config = _config(corpus, steps=40, **{"optimizer.learning_rate": 1e30, "optimizer.clip_norm": 0.0})
    with pytest.raises(UserError, match=r"the loss is .* at step \d+; lower optimizer.learning_rate=1e\+30"):
        train(config, tmp_path / "run")


def test_another_config_does_not_touch_the_workdir(corpus, tmp_path):
    train(_config(corpus, steps=4), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"was made with optimizer.learning_rate=0.01, the config has 0.02; choose a new"):
        train(_config(corpus, **{"optimizer.learning_rate": 0.02}), tmp_path)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "config field 'steps' is 0; give at least 1"),
        ({"batch_size": -1}, "config field 'batch_size' is -1; give at least 1"),
        ({"model.heads": 3}, "model.width=16 is not a multiple of 2 \\* model.heads=3"),
        ({"model.dtype": "float8"}, "model.dtype='float8' is not known"),
        ({"model.dropout": 1.0}, r"model.dropout=1.0 is not in \[0, 1\)"),
        ({"optimizer.schedule": "rsqr"}, "unknown optimizer.schedule 'rsqr'; did you mean 'rsqrt'"),
        ({"mesh.fsdp": 64}, "mesh.fsdp=64 does not divide"),
        ({"data.train": "/nowhere/*.txt"}, "no text file matches '/nowhere/"),
        ({"model.vocab_size": 90_000}, "no vocabulary of 90000 pieces can be trained"),
    ],
)
def test_bad_configs(corpus, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train(_config(corpus, **changes), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_unknown_fields(corpus, tmp_path):
    config = _config(corpus)
    with config.unlocked():
        config.optimizer.learning_rat = 0.1
    with pytest.raises(
        UserError, match=r"unknown config field 'optimizer.learning_rat'; did you mean 'optimizer.learning_rate'"
    ):
        train(config, tmp_path)


@pytest.mark.parametrize("damage", ["gone", "truncated", "foreign"])
def test_damaged_checkpoints(corpus, tmp_path, damage):
    train(_config(corpus, steps=4), tmp_path)
    largest = max((path for path in (tmp_path / "checkpoints/4/params").rglob("*") if path.is_file()), key=os.path.getsize)
    if damage == "gone":
        largest.unlink()
    elif damage == "truncated":
        largest.write_bytes(largest.read_bytes()[: os.path.getsize(largest) // 2])
    else:  # The parameters of a model of another shape.
        config = json.loads((tmp_path / "config.json").read_text())
        config["model"]["width"] = 32
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"checkpoint 4 in .* is damaged or of another model"):
        load_trained(str(tmp_path))
    if damage != "foreign":
        with pytest.raises(UserError, match=r"checkpoint 4 in .* is damaged or of another model"):
            train(_config(corpus), tmp_path)
