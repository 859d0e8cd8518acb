"""Tables 1 and 3, the phases and the profile: whole at toy size, its parts where the answer is known."""

import contextlib
import json

import jax
import pytest

from spectr_jax.config import latency_config
from spectr_jax.errors import UserError
from spectr_jax.experiments import latency, paper, profile


def _config(folder, **changes):
    config = latency_config()
    toy = str(folder / "target.safetensors")
    config.update({"models": (toy,), "draft": toy, "context": 16, "lengths": (2,), "batch_sizes": (1, 2), "runs": 4})
    config.update({"methods": ("spectr",), "num_drafts": 2, "phase_batch_sizes": (2,), **changes})
    return config


def test_the_tables_are_written(toy, tmp_path):
    result = latency.run(_config(toy.folder), tmp_path)
    assert json.loads((tmp_path / "latency.json").read_text()) == result
    assert [(cell["length"], cell["batch"]) for cell in result["cells"]] == [(2, 1), (2, 2)]
    assert result["cells"][0]["mean"] == pytest.approx(1) and all(cell["std"] > 0 for cell in result["cells"])
    (row,) = result["phases"]
    assert sum(row["share"].values()) == pytest.approx(1) and set(row["ms"]) == {*latency.PHASES, "call"}
    seen = {row["phase"]: row["operations"] for row in result["profile"]}
    assert {"draft", "score", "select", "commit"} <= set(seen)
    assert sum(row["share"] for row in result["profile"]) == pytest.approx(1)
    assert "`target`" in (tmp_path / "latency.md").read_text() and (tmp_path / "latency.png").stat().st_size > 5_000


def test_a_profiler_that_sees_nothing_costs_no_table(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "measure_cells", lambda *_: [{"model": "target", "median_ms": 1.0}])
    monkeypatch.setattr(latency, "_cell_table", lambda *_: "")
    monkeypatch.setattr(latency, "measure_phases", lambda *_: [])
    monkeypatch.setattr(latency, "plot", lambda *_: None)
    monkeypatch.setattr(jax.profiler, "trace", contextlib.nullcontext)
    latency.run(_config(toy.folder), tmp_path)
    assert "This machine shows it nothing" in (tmp_path / "latency.md").read_text()


def test_the_paper_has_every_cell_of_its_tables():
    assert {key: len(paper.LATENCY[key]) for key in paper.LATENCY} == {
        (model, length, batch): 2 for model in ("97M", "6M") for length in (4, 8) for batch in (1, 2, 4, 8)
    }


def test_operations_are_told_by_their_scope():
    program = """
  %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(f)/while/body/draft/exp" source_line=3}
  ROOT %dot.7 = f32[8,8]{1,0} dot(%a, %b), metadata={op_name="jit(f)/while/body/score/dot_general"}
  %copy.3 = f32[8]{0} copy(%a)
"""
    phases = profile.scopes(program)
    assert phases == {"fusion.1": "draft", "dot.7": "score"}
    rows = profile.summary({"fusion.1": (4, 0.002), "dot.7": (2, 0.006), "copy.3": (2, 0.002)}, phases, 2)
    assert [(row["phase"], row["kind"]) for row in rows] == [("score", "dot"), ("draft", "fusion"), ("other", "copy")]
    assert [row["ms"] for row in rows] == pytest.approx([3, 1, 1]) and [row["operations"] for row in rows] == [1, 2, 1]
    assert [row["share"] for row in rows] == pytest.approx([0.6, 0.2, 0.2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": 0}, "'runs' is 0"),
        ({"dtype": "int4"}, "dtype='int4' is not known"),
        ({"context": 30}, "context=30 and a call of 3 tokens exceed the context 32 of 'target'"),
        ({"models": ("random:target_1m",)}, "unknown shape 'target_1m'"),
        ({"methods": ("gsd",)}, "no option 'num_drafts'"),
    ],
)
def test_bad_configs_are_refused_before_any_work(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        latency.run(_config(toy.folder, **changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()
