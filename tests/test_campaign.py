"""The campaign at toy size: stopped and gone on with, within its limits, and what it leaves. The tables that this leaves out
for their time are rehearsed by hand: scripts/rehearse_campaign.sh."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from spectr_jax.loading import load
from spectr_jax.training.metrics import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
STAGES = ["pack", "train_2m", "train_6m", "train_20m", "train_97m", "tables", "quality", "collect"]
MODELS = ["draft_2m", "draft_6m", "draft_20m", "target_97m"]


def _command(work, *stages, **environment):
    return {
        "args": ["scripts/rehearse_campaign.sh", str(work), *stages],
        "cwd": ROOT,
        "env": {**os.environ, "PYTHON": sys.executable, **environment},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }


def _run(*args, **kwargs):
    return subprocess.run(**_command(*args, **kwargs))


@pytest.mark.xdist_group("campaign")
def test_the_campaign_is_stopped_and_goes_on(tmp_path):
    work = tmp_path / "campaign"
    metrics = work / "runs/draft_20m/metrics.jsonl"
    started = subprocess.Popen(**_command(tmp_path, *STAGES, FLAGS_train_20m="--config.steps=100000"))
    deadline = time.monotonic() + 240
    while not metrics.exists() and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=60)
    assert started.returncode == 75 and "stopped and saved at step" in output, output
    assert (work / "state/train_6m.done").exists() and not (work / "state/train_20m.done").exists()
    assert (work / "ladder/draft_6m.safetensors").exists()  # At once: the rest may never come.
    saved = int(output.split("stopped and saved at step ")[1].split()[0])

    other = work / "results/quality/quality.json"
    other.parent.mkdir(parents=True)
    other.write_text('{"config_hash": "of another"}')
    limited = _run(tmp_path, *STAGES, FLAGS_train_20m=f"--config.steps={saved + 10}", LIMITS="tables=0.01 train_20m=0.01")
    other.unlink()
    assert "unfinished: tables; the same command goes on" in limited.stdout, limited.stdout
    assert limited.returncode == 2 and "failed (see above): quality; mend that" in limited.stdout, limited.stdout
    assert (work / "back/draft_2m.safetensors").exists()
    assert f"going on from step {saved}" in limited.stdout and "train_6m (" not in limited.stdout
    whole = _run(tmp_path, *STAGES, MINUTES="8")
    assert whole.returncode == 0, whole.stdout
    assert "== train" not in whole.stdout and "== tables" in whole.stdout

    for name in MODELS:
        steps = [record["step"] for record in read_metrics(work / f"runs/{name}/metrics.jsonl")]
        assert steps[-1] == (saved + 10 if name == "draft_20m" else 20)
        assert load(str(work / "ladder" / name)).model.vocab_size == 320
    quality = json.loads((work / "results/quality/quality.json").read_text())["rows"]
    bits = [row["scores"]["float32"]["eval_bits_per_character"] for row in quality]
    assert bits[2] != bits[3] == pytest.approx(bits[2], rel=0.005)  # As it was trained, and stored in int8.
    table = json.loads((work / "results/table2/tokens_per_call.json").read_text())["rows"]
    assert [row["algorithm"] for row in table] == ["baseline", *["speculative", "otm_block"] * 3]

    back = list((work / "back").iterdir())
    assert all(path.stat().st_size <= 16e6 for path in back)
    (archive,) = (path for path in back if path.name.startswith("results.tar.gz"))
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    assert {"results/table2/tokens_per_call.md", "results/runs/draft_2m/loss.png", "results/minutes/train_97m"} <= names
    assert {f"{name}.safetensors" for name in MODELS} | {"tokenizer.model"} <= {path.name for path in back}


def test_what_cannot_run_yet_is_left_for_another_call(tmp_path):
    def call(*stages, **environment):
        done = _run(tmp_path, *stages, **environment)
        return done.returncode, done.stdout

    status, output = call("tables", "figures")
    assert status == 75 and "== tables waits for: " in output and "unfinished: tables figures" in output
    for name in MODELS:
        assert name in output.split("waits for: ")[1].splitlines()[0]
    (tmp_path / "campaign/ladder").mkdir()
    for name in MODELS:
        (tmp_path / f"campaign/ladder/{name}-00001-of-00002.safetensors").touch()
    status, output = call("speed", "peers", PEERS="")
    assert status == 0 and "left out: STEPS is set" in output and "left out: PEERS is not set" in output
    assert not list((tmp_path / "campaign/state").glob("*.done"))


def test_an_interpreter_without_the_package_finds_it(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "PYTHONPATH=$PYTHONPATH"\nexit 1\n')
    python.chmod(0o755)
    (tmp_path / "data/packed").mkdir(parents=True)
    (tmp_path / "data/heldout-0.txt").write_text("A sentence.\n")
    arguments = ["scripts/campaign.sh", f"{tmp_path}/data", f"{tmp_path}/work", "speed"]
    done = subprocess.run(**{**_command(tmp_path, PYTHON=str(python)), "args": arguments})
    assert done.returncode == 2 and f"PYTHONPATH={ROOT}" in done.stdout, done.stdout


def test_a_packed_corpus_of_the_users_is_never_removed(tmp_path):
    packed = tmp_path / "data/packed"
    packed.mkdir(parents=True)
    (tmp_path / "data/heldout-0.txt").write_text("A sentence.\n")
    (packed / "train-00000.npy").write_text("rows")
    for stage, message in (
        ("pack", "has no packed.json; pack it again, or remove it"),
        ("train_2m", "run the stage speed, or"),
    ):
        call = {**_command(tmp_path), "args": ["scripts/campaign.sh", f"{tmp_path}/data", f"{tmp_path}/work", stage]}
        done = subprocess.run(**call)
        assert done.returncode == 2 and message in done.stdout, done.stdout
    assert (packed / "train-00000.npy").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": ("train_3m",)}, "there is no stage 'train_3m'; give some of: pack speed"),
        ({"LIMITS": "tables"}, "LIMITS has 'tables'; give STAGE=MINUTES"),
        ({"MINUTES": "nine"}, "MINUTES is 'nine'; give a number of minutes"),
        ({"missing": "heldout"}, "has no heldout-*; put held-out sentences there"),
        ({"missing": "train"}, "has no train-* and no packed/"),
        ({"missing": ""}, "is no folder"),
    ],
)
def test_bad_calls_end_before_any_work(tmp_path, change, message):
    missing = change.pop("missing", None)
    if missing != "":
        (tmp_path / "data").mkdir()
    for split in {"heldout", "train"} - {missing}:
        if missing != "":
            (tmp_path / f"data/{split}-0.txt").write_text("A sentence.\n")
    stages = change.pop("stages", ())
    done = subprocess.run(
        **{**_command(tmp_path, **change), "args": ["scripts/campaign.sh", f"{tmp_path}/data", f"{tmp_path}/work", *stages]}
    )
    assert done.returncode == 2 and message in done.stdout.replace("\n", " "), done.stdout
    assert not (tmp_path / "work").exists()
