"""Bad input at the command line: one line on stderr, exit status 2, nothing written."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

TRAIN, EVAL = ("spectr_jax.train", "--config=configs/embedded.py"), ("spectr_jax.eval", "--config=configs/demo.py")
TREES = ("spectr_jax.eval", "--config=configs/trees.py")
FIGURES = ("spectr_jax.figures",)
CASES = [
    (TRAIN, "--config.learning_rat=1", "unknown config field 'learning_rat'"),
    (TRAIN, "--config.steps=many", "flag --config.steps=many"),
    (TRAIN, "--config.data.train=/nowhere/*.xz", "no text file matches '/nowhere/*.xz'"),
    (TRAIN, "--config.early_exit.layer=2", "early_exit.layer=2 is not one of the layers 1..1 before the last"),
    (TRAIN, "--config.batch_size=0", "config field 'batch_size' is 0; give at least 1"),
    (
        ("spectr_jax.train", "--config=configs/embedded.py:draft_7m"),
        "",
        "unknown model of this ladder 'draft_7m'; did you mean 'draft_6m'?",
    ),
    (("spectr_jax.train", "--config=configs/none.py"), "", "the config file cannot be loaded"),
    (("spectr_jax.train",), "", "Flag --config must have a value"),
    (
        TRAIN,
        "--coordinator=localhost:1234",
        "--processes is missing; give --coordinator, --processes and --process_id together",
    ),
    (
        (*TRAIN, "--coordinator=localhost:1234", "--processes=2"),
        "--process_id=2",
        "--process_id=2 is not in 0..1; each of --processes=2 has its own",
    ),
    (TRAIN, "--distributed", "no other processes were found in the environment (TPU pod, Slurm, Open MPI)"),
    (EVAL, "--config.methods=('spectre',)", "unknown method 'spectre'; did you mean 'spectr'?"),
    (EVAL, "--config.num_drafts=(0,)", "config field 'num_drafts' is 0; give at least 1"),
    (EVAL, "--config.draft_lengths=(4,-1)", "config field 'draft_lengths' is -1; give at least 1"),
    (EVAL, "--config.target=embedded:draft_7m", "unknown embedded model 'draft_7m'"),
    (EVAL, "--config.target=/nowhere", "no model at '/nowhere'"),
    (EVAL, "--config.prompt_tokens=100", "exceed the context 128"),
    (EVAL, "--config.num_prompts=5000", "has 257 prompts, num_prompts is 5000; lower it"),
    (EVAL, "--config.temperature=-1.0", "temperature=-1.0 is not a finite number of at least 0"),
    (EVAL, "--config.experiment=tree", "unknown experiment 'tree'; did you mean 'trees'?"),
    (TREES, "--config.extra_trees=('4;2',)", "tree '4;2' is not known; give the children of each level"),
    (TREES, "--config.exit_layer=2", "exit_layer=2 of a target of 2 layers; give fewer, or 0"),
    (FIGURES, "--only=spectr_figure_4", "unknown figure 'spectr_figure_4'; did you mean"),
    (FIGURES, "--draws=0", "--draws=0 is less than 1; give at least 1"),
    (FIGURES, "--pairs=many", "flag --pairs=many"),
]


@pytest.mark.parametrize(("command", "flag", "message"), CASES, ids=lambda value: value if isinstance(value, str) else None)
def test_one_line_and_status_2(command, flag, message, tmp_path):
    arguments = [*command, *([flag] if flag else []), f"--workdir={tmp_path / 'workdir'}"]
    result = subprocess.run([sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0], result.stderr
    written = [path for path in (tmp_path / "workdir").rglob("*") if path.is_file()]
    assert not written


def test_help_needs_no_jax():
    result = subprocess.run([sys.executable, "-m", "spectr_jax.eval", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert "--workdir" in result.stdout + result.stderr
