"""Tests that the journal resumes a stopped table, and refuses to mix different runs."""

import functools
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from spectr_jax.experiments.config import eval_config
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.finished import Finished
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.models.frozen import digest
from spectr_jax.utils.errors import UserError


def _never():
    raise AssertionError("measured twice")


@pytest.fixture
def check_out(monkeypatch):
    """Returns a function that changes the commit that `report.provenance` reports."""
    made = report.provenance()

    def set_commit(commit):
        monkeypatch.setattr(report, "provenance", lambda: {**made, "commit": commit})

    return set_commit


def test_a_table_names_the_commits_that_measured_it(tmp_path, check_out):
    opened = functools.partial(Journal, tmp_path, "table", eval_config(), ["draft 0123"])
    first, second = "a" * 40, "b" * 40 + "-dirty"
    check_out(first)
    running = opened()
    assert running.get_or_measure("row", lambda: [1.5]) == [1.5]
    check_out(second)  # A commit made while the table runs is not recorded.
    assert (running.about()["commit"], running.about()["commits"]) == (first, [first])
    assert f"commit {'a' * 12}, jax" in report.provenance_line(running.about())
    about = opened().about()
    assert opened().get_or_measure("row", _never) == [1.5]
    assert (about["commit"], about["commits"]) == (second, [first, second])
    assert about["weights"] == ["draft 0123"]
    assert f"commits {'a' * 12}, {'b' * 12}-dirty, jax" in report.provenance_line(about)
    check_out(first)
    assert opened().about()["commits"] == [first, second]


def test_a_finished_table_is_measured_again_only_on_demand(tmp_path):
    opened = functools.partial(Journal, tmp_path, "table", eval_config())
    table, journal = tmp_path / "table.json", tmp_path / "table.part.jsonl"
    first = opened(["draft 0123"])
    first.get_or_measure("row", lambda: 1)
    left = journal.read_text()
    first.finish({"row": 1}, lambda result: "")
    written = table.read_text()
    journal.write_text(left)  # As if the run was killed just after it wrote the table.
    os.utime(journal, (1, 1))
    with pytest.raises(Finished, match=r"table.json is finished: commit"):
        opened(["draft 0123"])
    with pytest.raises(UserError, match="other weights"):
        opened(["draft 4567"])
    assert journal.read_text() == left
    assert opened(["draft 4567"], again=True).get_or_measure("row", lambda: 2) == 2
    second = opened(["draft 4567"], again=True)
    assert second.get_or_measure("row", _never) == 2 and table.read_text() == written
    second.finish({"row": 2}, lambda result: "")
    assert json.loads(table.read_text())["row"] == 2 and not journal.exists()
    changed = eval_config()
    changed.batch_size += 1
    with pytest.raises(UserError, match=r"another config \(its batch_size is 32, not 33\)"):
        Journal(tmp_path, "table", changed, ["draft 4567"], again=True)


def test_inputs_are_known_by_their_digest(tmp_path):
    opened = functools.partial(Journal, tmp_path, "table", eval_config(), ["draft 0123"])
    first = opened(inputs="0123")
    first.get_or_measure("row", lambda: 1)
    assert opened(inputs="0123").get_or_measure("row", _never) == 1
    with pytest.raises(UserError, match="other inputs"):
        opened(inputs="4567")
    assert first.finish({"row": 1}, lambda result: "")["inputs"] == "0123"
    with pytest.raises(UserError, match="is a table of other prompts"):
        opened(inputs="4567")
    assert "row" not in opened(inputs="4567", again=True)
    table = tmp_path / "table.json"
    made = json.loads(table.read_text())
    table.write_text(json.dumps({name: made[name] for name in made if name != "inputs"}))
    with pytest.raises(Finished):  # Tables of older versions do not name their inputs.
        opened(inputs="4567")


def test_an_incomplete_first_line_is_overwritten(tmp_path):
    opened = functools.partial(Journal, tmp_path, "table", eval_config(), [])
    (tmp_path / "table.part.jsonl").write_text('{"config_ha')
    opened().get_or_measure("row", lambda: 1)
    assert opened().get_or_measure("row", _never) == 1


def test_a_journal_of_other_weights_is_refused(tmp_path):
    """A model that was trained further has the same name but other weights."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    trained = types.SimpleNamespace(name="draft", model=_as_model(model), tokenizer=None)
    Journal(tmp_path, "table", eval_config(), report.weights(trained))
    Journal(tmp_path, "table", eval_config(), report.weights(trained))
    model.kernel[...] = model.kernel[...].at[1, 2].add(1e-6)
    with pytest.raises(UserError, match="other weights"):
        Journal(tmp_path, "table", eval_config(), report.weights(trained))


def test_a_table_without_its_plot_is_not_finished(tmp_path):
    """The JSON, which says that a table is finished, is written last: a failed plot loses nothing."""

    def fails(result, path):
        raise OSError("no space left")

    arguments = tmp_path, "table", eval_config(), []
    journal = Journal(*arguments)
    assert journal.get_or_measure("row", lambda: 7) == 7
    with pytest.raises(OSError, match="no space left"):
        journal.finish({}, lambda result: "page", fails)
    assert not (tmp_path / "table.json").exists()
    resumed = Journal(*arguments)
    assert resumed.get_or_measure("row", lambda: 8) == 7
    resumed.finish({}, lambda result: "page", lambda result, path: path.write_text("plot"))
    with pytest.raises(Finished):
        Journal(*arguments)


def test_two_processes_cannot_make_one_table(tmp_path):
    held = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    held += "; print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", held, str(tmp_path / ".table.lock")]
    arguments = tmp_path, "table", eval_config(), []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match="another process makes this table"):
            Journal(*arguments)
        process.communicate()
    Journal(*arguments).finish({}, lambda result: "page")
    assert {path.name for path in tmp_path.iterdir()} == {"table.json", "table.md"}


def test_digests_depend_on_weights_shapes_and_dtypes():
    def linear(width=3, seed=0, dtype=jnp.float32):
        return _as_model(nnx.Linear(2, width, param_dtype=dtype, rngs=nnx.Rngs(seed)))

    models = linear(), linear(4), linear(seed=1), linear(dtype=jnp.bfloat16)
    assert digest(linear()) == digest(linear())
    assert len({digest(model) for model in models}) == 4
    # The state of dropout is a random key.
    dropout = _as_model(nnx.Dropout(0.5, rngs=nnx.Rngs(jax.random.key(0))))
    assert len(digest(dropout)) == 12


def _as_model(module):
    module.vocab_size = module.context = module.layers = 1
    module.init_cache = module.extend = len  # Never called.
    return module
