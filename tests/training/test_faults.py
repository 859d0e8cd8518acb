"""Tests that each fault of a run gives a clear message and keeps the last good checkpoint."""

import errno
import json
import os
import resource
import signal
import subprocess

import jax
import numpy as np
import pytest

from spectr_jax.loading.by_name import load
from spectr_jax.models.formats.checkpoint import Checkpoints
from spectr_jax.training import loop
from spectr_jax.training.interruption import Interruption
from spectr_jax.training.loop import train
from spectr_jax.training.metrics import Curves, MetricsLog
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.sharding import make_mesh


def _saved(workdir):
    return sorted(
        int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()
    )


def _largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=os.path.getsize)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(config, start, wait_for_step, losses, tmp_path):
    """After SIGKILL, the resumed run has the losses and parameters of an uninterrupted run."""
    changes = {"steps": 60, "checkpoint_every": 10, "eval_every": 30}
    whole = train(config(**changes), tmp_path / "whole")
    process = start(tmp_path / "killed", **changes)
    wait_for_step(tmp_path / "killed", 23, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert max(losses(tmp_path / "killed")) < 60
    resumed = train(config(**changes), tmp_path / "killed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for ours, theirs in zip(
        jax.tree.leaves(resumed.params), jax.tree.leaves(whole.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_exits_with_75(start, wait_for_step, losses, tmp_path):
    """A test in `test_scale.py` sends SIGTERM instead."""
    process = start(tmp_path, steps=100_000)
    wait_for_step(tmp_path, 10, process)
    process.send_signal(signal.SIGINT)
    log = process.communicate(timeout=120)[0]
    assert process.returncode == 75, log
    step = max(losses(tmp_path))
    assert f"stopped and saved at step {step} of 100000; the same command resumes" in log
    assert _saved(tmp_path)[-1] == step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_repeated_within_a_second_counts_once(monkeypatch, capfd, number):
    """`timeout` sends SIGTERM to a run and then to its process group, so the second is ignored.

    A signal that comes more than a second later interrupts the run at once.
    """
    clock = [100.0]
    monkeypatch.setattr("spectr_jax.training.interruption.time.monotonic", lambda: clock[0])
    with Interruption() as interruption:
        assert not interruption.requested(1)
        for clock[0] in (100.0, 100.0, 100.9):
            try:
                signal.raise_signal(number)
            except KeyboardInterrupt:
                pytest.fail("the repeated signal interrupted the run")
            assert interruption.requested(2)
        clock[0] = 101.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert capfd.readouterr().err.count("stopping after this step") == 1


def test_a_non_finite_loss_stops_training_before_saving(config, losses, tmp_path):
    """The error names the first such step, also if a later step is the next to be logged."""
    changes = {"steps": 40, "checkpoint_every": 1, "optimizer.clip_norm": 0.0}
    changes |= {"optimizer.warmup_steps": 30, "optimizer.learning_rate": 1e7}
    with pytest.raises(UserError, match=r"lower optimizer.learning_rate=10000000.0") as caught:
        train(config(**changes), tmp_path)
    first = f" at step {max(losses(tmp_path)) + 1}; "
    assert first in str(caught.value)
    assert f"(last good checkpoint: {_saved(tmp_path)[-1]})" in str(caught.value)
    rarely = {"log_every": 40, "checkpoint_every": 40, "eval_every": 40}
    with pytest.raises(UserError, match=first):
        train(config(**{**changes, **rarely}), tmp_path / "rarely")
    params = jax.tree.leaves(load(str(tmp_path)).model)
    assert params and all(np.isfinite(leaf).all() for leaf in params)


@pytest.mark.parametrize("damage", ["missing parameters", "empty state"])
def test_a_damaged_checkpoint_falls_back_to_the_previous_one(
    config, losses, tmp_path, capfd, damage
):
    whole = train(config(), tmp_path)
    curve = losses(tmp_path)
    newest = tmp_path / "checkpoints/12"
    if damage == "missing parameters":
        _largest(newest / "params").unlink()
    else:
        _largest(newest / "rest").write_bytes(b"")
    resumed = train(config(), tmp_path)
    assert (
        f"checkpoint 12 cannot be read and was moved to '{tmp_path}/damaged'"
        in capfd.readouterr().out
    )
    assert (tmp_path / "damaged/12").is_dir() and _saved(tmp_path)[-1] == 12
    assert losses(tmp_path) == curve
    for ours, theirs in zip(
        jax.tree.leaves(resumed.params), jax.tree.leaves(whole.params), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_hosts_restore_the_same_step(config, tmp_path, monkeypatch):
    """Another host, which is simulated, cannot read the newest checkpoint."""
    train(config(), tmp_path)
    given = []

    def gather(value):
        given.append(value)
        return [value, "cannot be read" if value == "" and given.count("") == 1 else value]

    checkpoints = Checkpoints(tmp_path / "checkpoints")
    monkeypatch.setattr("spectr_jax.models.formats.checkpoint.hosts.gather", gather)
    state, damaged = checkpoints.restore(loop.make_programs(config(), make_mesh(1)).like)
    checkpoints.close()
    assert (int(state.step), damaged, _saved(tmp_path)) == (8, [12], [6, 8])


def test_only_errors_of_writing_are_reported_as_such(tmp_path):
    below = str(tmp_path / "a/b")
    for error, expected, message in (
        (OSError(errno.ENOSPC, "No space left on device"), UserError, "written .*; make room, and"),
        (
            PermissionError(errno.EACCES, "Denied", below),
            UserError,
            "used .Denied.; restore it, or",
        ),
        (FileNotFoundError(errno.ENOENT, "None", below), UserError, "used .None.; restore it, or"),
        (FileNotFoundError(errno.ENOENT, "No such file", "/nowhere"), FileNotFoundError, "No such"),
        (ConnectionError("the coordinator does not answer"), ConnectionError, "the coord"),
    ):
        with pytest.raises(expected, match=message), loop.explained(tmp_path):
            raise error


def test_lines_of_metrics_without_a_step_are_dropped_on_resumption(tmp_path):
    path, good = tmp_path / "metrics.jsonl", '{"step": 1, "loss": 2.0}\n'
    path.write_text('{"loss": 3.0}\n[1]\n{"step": "2"}\n' + good + '{"step": null}\n{"st')
    MetricsLog(tmp_path, 5, Curves("loss", "eval", "nats"))
    assert path.read_text() == good


@pytest.mark.parametrize("damage", ["missing file", "truncated file", "other model shape"])
def test_an_unreadable_only_checkpoint_is_reported_and_kept(config, tmp_path, damage):
    """The checkpoint stays where it is: only checkpoints after a readable one are moved."""
    train(config(steps=4), tmp_path)
    largest = _largest(tmp_path / "checkpoints/4/params")
    if damage == "missing file":
        largest.unlink()
    elif damage == "truncated file":
        largest.write_bytes(largest.read_bytes()[: os.path.getsize(largest) // 2])
    else:
        stored = json.loads((tmp_path / "config.json").read_text())
        stored["model"]["width"] = 32
        (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"checkpoint 4 in .* is damaged or of another model"):
        load(str(tmp_path))
    if damage != "other model shape":
        with pytest.raises(UserError, match=r"checkpoint 4 in .* is damaged or of another model"):
            train(config(), tmp_path)
    assert _saved(tmp_path) == [4] and not (tmp_path / "damaged").exists()


def test_a_half_written_checkpoint_is_ignored(config, tmp_path):
    """A run that is killed while it saves leaves a folder under its temporary name."""
    train(config(steps=4), tmp_path)
    (tmp_path / "checkpoints/4").rename(tmp_path / "checkpoints/4.orbax-checkpoint-tmp")
    with pytest.raises(UserError, match="no complete checkpoint in"):
        load(str(tmp_path))
    state = train(config(steps=4), tmp_path)
    assert int(state.step) == 4 and [
        path.name for path in (tmp_path / "checkpoints").iterdir()
    ] == ["4"]


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint_intact(config, command, losses, tmp_path):
    """A limit of 60 kB per file stands for the full disk. Without it the run continues."""
    changes = {"model.width": 64, "steps": 4}
    train(config(**changes), tmp_path)
    before = losses(tmp_path)
    changes["steps"] = 8

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))

    result = subprocess.run(
        command(tmp_path, **changes), capture_output=True, text=True, preexec_fn=limit
    )
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: a checkpoint could not be saved in") and "make room" in last
    assert "resumes from step 4, which is whole" in last
    assert _saved(tmp_path) == [4]
    assert int(train(config(**changes), tmp_path).step) == 8
    assert {step: losses(tmp_path)[step] for step in before} == before and len(
        losses(tmp_path)
    ) == 8


def test_an_out_of_memory_error_names_settings_that_help(config, tmp_path, monkeypatch):
    def step(state, batch):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.\nmore"
        )

    made = loop.make_programs
    monkeypatch.setattr(loop, "make_programs", lambda *args: made(*args)._replace(step=step))
    with pytest.raises(
        UserError,
        match=r"out of memory \(RESOURCE_.*99 bytes.\); raise accumulate, set remat=True, or lower",
    ):
        train(config(), tmp_path)


def test_missing_and_truncated_data_files_are_reported(config, corpus, tmp_path, array_records):
    """A missing file is reported before training starts. A truncated file stops a new run at
    a sentence that the error names, and a resumed one at once. The last checkpoint is kept."""
    files = array_records(tmp_path, (corpus / "train.txt").read_text().splitlines(), shards=2)
    changes = {
        "data.train": "tfds:lm1b:train",
        "data.tfds_dir": str(tmp_path),
        "checkpoint_every": 2,
    }
    train(config(**changes, steps=8), tmp_path / "run")
    content = files[-1].read_bytes()
    files[-1].unlink()
    with pytest.raises(
        UserError,
        match=rf"1 files of .* missing, the first is '{files[-1]}'; restore them, or remove '{files[-1].parent}'",
    ):
        train(config(**changes, steps=400), tmp_path / "run")
    files[-1].write_bytes(content[: len(content) // 2])
    with pytest.raises(
        UserError,
        match=r"sentence \d+ of 'tfds:lm1b:train' cannot be read .* restore the file, or remove",
    ):
        train(config(**changes, steps=400), tmp_path / "new")
    with pytest.raises(UserError, match=r"data.train='tfds:lm1b:train': its content has changed"):
        train(config(**changes, steps=400), tmp_path / "run")
    assert _saved(tmp_path / "run")[-1] >= 8
    files[-1].write_bytes(content)
    assert int(train(config(**changes, steps=10), tmp_path / "run").step) == 10
