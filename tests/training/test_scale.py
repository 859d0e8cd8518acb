"""Tests that a run is the same on one device, on eight devices and in two processes."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from helpers import answers, free_port, started, virtual_devices
from spectr_jax.training import preparation
from spectr_jax.training.loop import train
from spectr_jax.training.metrics import read_metrics
from spectr_jax.utils.errors import UserError

pytestmark = pytest.mark.xdist_group("scale")  # Most tests share trained runs.

# With dropout, the parts of an accumulated batch would have masks of their own.
CHANGES = {
    "steps": 20,
    "batch_size": 16,
    "eval_every": 10,
    "checkpoint_every": 10,
    "model.dropout": 0.0,
}
# These runs never save on their own: if a process dies during a save, the other waits long for it.
ENDLESS = {"steps": 100_000, "checkpoint_every": 100_000}
VARIANTS = {
    "8-way data parallel": {},
    "8-way fsdp": {"mesh.fsdp": 8},
    "2-way fsdp, 2 accumulated parts, remat": {"mesh.fsdp": 2, "accumulate": 2, "remat": True},
}
TRAIN_ON_EIGHT = """
import json, pathlib, sys
import jax
from spectr_jax.training.config import train_config
from spectr_jax.training.loop import train
assert jax.device_count() == 8
sharded = {}
for workdir, fields in json.loads(sys.stdin.read()):
    config = train_config("draft_2m")
    config.update_from_flattened_dict(fields)
    state = train(config, pathlib.Path(workdir))
    kernel = state.params["blocks"][0]["up"]["kernel"][...]
    sharded[workdir] = kernel.size // kernel.addressable_shards[0].data.size
print(json.dumps(sharded))
"""

DECODING = """
import sys
from spectr_jax.utils import hosts
folder, prompts, *flags = sys.argv[1:]
if flags:
    hosts.connect(flags[0], 2, int(flags[1]))
from spectr_jax.experiments.config import eval_config
from spectr_jax.decoding import get_method
from spectr_jax.loading.by_name import load
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.measurement import Contender, read_prompts
config = eval_config()
config.update({"prompts": prompts, "num_prompts": 13, "batch_size": 8, "max_new_tokens": 9})
target, draft = load(folder + "/whole"), load(folder + "/draft")
prompts = read_prompts(config, target.tokenizer)
program = Contender(get_method("speculative", draft_length=2), draft)
done = Bench(config, target, [draft], prompts, None).run(program, seed=3)
print([done.tokens, done.calls])
"""


@pytest.fixture(scope="module")
def one(config, tmp_path_factory):
    """Returns a folder with the run on one device and two copies of it that stop at step 10."""
    folder = tmp_path_factory.mktemp("one")
    train(config(**CHANGES), folder / "whole")
    train(config(**{**CHANGES, "steps": 10}), folder / "half")
    shutil.copytree(folder / "half", folder / "draft")
    return folder


@pytest.fixture(scope="module")
def eight(one, fields, tmp_path_factory):
    """Returns the folder of the variants on eight devices, and {workdir: shards per kernel}.

    The stopped run takes its second half on eight devices too.
    """
    folder = tmp_path_factory.mktemp("eight")
    runs = [
        (str(folder / name), fields(**{**CHANGES, **changes})) for name, changes in VARIANTS.items()
    ]
    runs.append((str(one / "half"), fields(**{**CHANGES, "mesh.fsdp": 2})))
    result = subprocess.run(
        [sys.executable, "-c", TRAIN_ON_EIGHT],
        input=json.dumps(runs),
        env=virtual_devices(8),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return folder, json.loads(result.stdout.splitlines()[-1])


def _check_same_metrics(ours, theirs):
    for name in ("loss", "grad_norm", "eval_nats_per_token", "eval_bits_per_character"):
        records = [read_metrics(run / "metrics.jsonl") for run in (ours, theirs)]
        values = [
            [record[name] for record in run if name in record and record["step"] <= 20]
            for run in records
        ]
        assert len(values[0]) == len(values[1]) > 0
        np.testing.assert_allclose(*values, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_training_on_eight_devices_matches_one_device(one, eight, losses, variant):
    """Loss, gradient norm and held-out loss agree to 1e-5 over 20 steps. The loss falls by 0.3."""
    folder, sharded = eight
    assert losses(one / "whole")[20] < losses(one / "whole")[1] - 0.3
    _check_same_metrics(folder / variant, one / "whole")
    assert sharded[str(folder / variant)] == VARIANTS[variant].get("mesh.fsdp", 1)


@pytest.mark.slow
def test_a_run_resumes_on_a_different_number_of_devices(one, eight):
    """The run takes ten steps on one device, and then ten on eight."""
    assert len(read_metrics(one / "half/metrics.jsonl")) == 22
    _check_same_metrics(one / "half", one / "whole")


def _start_two(start, workdir, **changes):
    port = free_port()
    flags = [
        (f"--coordinator=localhost:{port}", "--processes=2", f"--process_id={index}")
        for index in range(2)
    ]
    return [start(workdir, *each, env=virtual_devices(2), **changes) for each in flags]


@pytest.mark.slow
def test_two_processes_train_stop_and_resume_as_one(
    one, config, start, wait_for_step, losses, tmp_path
):
    """Two processes of two devices have the losses of one device. After SIGTERM to one of them,
    both save and stop. If one is killed, the other exits, and a single process resumes the run."""
    workdir = tmp_path / "run"
    processes = _start_two(start, workdir, **{**CHANGES, **ENDLESS})
    # By step 40 the run is in another epoch.
    wait_for_step(workdir, 40, processes[0])
    processes[1].terminate()
    logs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [75, 75], logs
    stopped = max(losses(workdir))
    assert all(f"stopped and saved at step {stopped} of 100000" in log for log in logs)
    _check_same_metrics(workdir, one / "whole")

    processes = _start_two(start, workdir, **{**CHANGES, **ENDLESS})
    wait_for_step(workdir, stopped + 15, processes[0])
    processes[1].kill()
    logs = [process.communicate(timeout=120)[0] for process in processes]
    assert processes[1].returncode == -signal.SIGKILL and processes[0].returncode not in (0, 75), (
        logs[0]
    )
    assert f"resuming from step {stopped}" in logs[0]
    logged = max(losses(workdir))
    assert logged >= stopped + 15
    steps = logged + 5
    train(config(**{**CHANGES, "steps": steps}), workdir)
    train(config(**{**CHANGES, "steps": steps}), tmp_path / "whole")
    assert len(losses(workdir)) == steps
    np.testing.assert_allclose(
        list(losses(workdir).values()), list(losses(tmp_path / "whole").values()), atol=1e-4
    )


@pytest.mark.slow
def test_decoding_totals_do_not_depend_on_devices_or_processes(one, corpus):
    """One device, and two processes of two devices each, emit the same number of tokens in the same
    number of target calls. The models are loaded from workdirs."""
    command = "-c", DECODING, str(one), str(corpus / "heldout.txt")
    port = f"localhost:{free_port()}"
    runs = [(1, []), (2, [port, "0"]), (2, [port, "1"])]
    totals = answers(*(started(devices, *command, *flags) for devices, flags in runs))
    assert totals[0] == totals[1] == totals[2] and totals[0][0] > 13


@pytest.mark.parametrize(
    ("changes", "devices", "message"),
    [
        ({"batch_size": 12}, 8, "batch_size=12: must divide over 8 devices in .* multiple of 8"),
        ({"accumulate": 3}, 1, "batch_size=8: must divide over .* accumulate=3 parts; .* of 3"),
    ],
)
def test_indivisible_batch_sizes_are_refused(config, changes, devices, message):
    with pytest.raises(UserError, match=message):
        preparation.check_batch_size(config(**changes), devices)
