"""What a table keeps between its starts, and what it refuses to mix."""

import functools
import json
import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from spectr_jax.experiments.config import eval_config
from spectr_jax.experiments.measure import report
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.models.frozen import digest
from spectr_jax.utils.errors import UserError


def _never():
    raise AssertionError("measured twice")


@pytest.fixture
def at(monkeypatch):
    """Sets the commit."""
    made = report.provenance()
    return lambda commit: monkeypatch.setattr(
        report, "provenance", lambda: {**made, "commit": commit}
    )


def test_a_table_names_the_commits_that_measured_it(tmp_path, at):
    opened = functools.partial(Journal, tmp_path, "table", eval_config(), ["draft 0123"])
    first, second = "a" * 40, "b" * 40 + "-dirty"
    at(first)
    begun = opened()
    assert begun.value("row", lambda: [1.5]) == [1.5]
    at(second)  # A commit beside the running table is not its own.
    assert (begun.about()["commit"], begun.about()["commits"]) == (first, [first])
    assert f"commit {'a' * 12}, jax" in report.made_by(begun.about())
    about = opened().about()
    assert opened().value("row", _never) == [1.5]
    assert (about["commit"], about["commits"], about["weights"]) == (
        second,
        [first, second],
        ["draft 0123"],
    )
    assert f"commits {'a' * 12}, {'b' * 12}-dirty, jax" in report.made_by(about)
    at(first)
    assert opened().about()["commits"] == [first, second]


def test_a_first_line_that_was_cut_short_is_written_over(tmp_path):
    opened = functools.partial(Journal, tmp_path, "table", eval_config(), [])
    (tmp_path / "table.part.jsonl").write_text('{"config_ha')
    opened().value("row", lambda: 1)
    assert opened().value("row", _never) == 1


def test_other_weights_are_refused(tmp_path):
    """As of a model that was trained on, under the same name."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    trained = types.SimpleNamespace(name="draft", model=_as_model(model), tokenizer=None)
    Journal(tmp_path, "table", eval_config(), report.weights(trained))
    Journal(tmp_path, "table", eval_config(), report.weights(trained))
    model.kernel[...] = model.kernel[...].at[1, 2].add(1e-6)
    with pytest.raises(UserError, match=r"with other weights.*choose a new --workdir"):
        Journal(tmp_path, "table", eval_config(), report.weights(trained))


def test_digests_tell_weights_shapes_and_precisions():
    def linear(width=3, seed=0, dtype=jnp.float32):
        return _as_model(nnx.Linear(2, width, param_dtype=dtype, rngs=nnx.Rngs(seed)))

    assert digest(linear()) == digest(linear())
    assert (
        len(
            {
                digest(each)
                for each in (linear(), linear(4), linear(seed=1), linear(dtype=jnp.bfloat16))
            }
        )
        == 4
    )
    dropout = _as_model(nnx.Dropout(0.5, rngs=nnx.Rngs(jax.random.key(0))))  # Its state is a key.
    assert len(digest(dropout)) == 12


def test_a_table_of_a_script_is_not_mixed_with_another(tmp_path):
    path = tmp_path / "trees.json"
    assert report.begun(path, {"weights": ["draft 0123"]}) == ([], 0.0)
    rows = [{"method": "otm"}]
    path.write_text(
        json.dumps(
            {
                "settings": {"weights": ["draft 0123"], "trees": ["2x2"]},
                "rows": rows,
                "seconds": 2.5,
            }
        )
    )
    assert report.begun(path, {"weights": ["draft 0123"]}) == (rows, 2.5)
    with pytest.raises(UserError, match=r"other settings, \{'weights': \['draft 0123'\]\}"):
        report.begun(path, {"weights": ["draft 4567"]})


def _as_model(module):
    module.vocab_size = module.context = module.layers = 1
    return module
