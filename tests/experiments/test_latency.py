"""Tests the latency tables (SpecTr, Tables 1 and 3), the phases of a call, and the profile.

The whole run is at toy size, and its parts run where the answer is known.
"""

import contextlib
import json
import re
import types

import jax
import pytest

from helpers import stopping
from spectr_jax.experiments import latency, paper
from spectr_jax.experiments.config import latency_config
from spectr_jax.experiments.measure import profile
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.utils.errors import UserError


def _config(folder, **changes):
    config = latency_config()
    toy = str(folder / "target.safetensors")
    config.update(
        {
            "models": (toy,),
            "draft": toy,
            "context": 16,
            "lengths": (2,),
            "batch_sizes": (1, 2),
            "runs": 4,
        }
    )
    config.update({"methods": ("spectr",), "num_drafts": 2, "phase_batch_sizes": (2,), **changes})
    return config


@pytest.mark.slow
def test_a_stopped_run_resumes_and_writes_the_tables(toy, tmp_path, monkeypatch):
    """The run is stopped in the third of four turns and at the profile, and resumes each time. The
    test sets the time of each journal entry to one hour, which the result must include."""
    made, calls, phases, profiles = [], [], [], []
    make = stopping(latency.call_runs, made, 0)
    monkeypatch.setattr(latency, "call_runs", lambda *args: stopping(make(*args), calls, 6))
    monkeypatch.setattr(latency, "phase_timers", stopping(latency.phase_timers, phases, 0))
    monkeypatch.setattr(
        profile, "generation_profile", stopping(profile.generation_profile, profiles, 1)
    )
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            latency.run(_config(toy.folder), tmp_path)
    journal = tmp_path / "latency.part.jsonl"
    journal.write_text(re.sub(r'"seconds": [\d.]+}\n', '"seconds": 3600}\n', journal.read_text()))
    result = latency.run(_config(toy.folder), tmp_path)
    assert (len(made), len(calls), len(phases), len(profiles)) == (2 + 2, 6 + 4, 1, 2)
    assert result["seconds"] >= (4 + 1) * 3600 and not journal.exists()
    assert json.loads((tmp_path / "latency.json").read_text()) == result
    assert [(cell["length"], cell["batch"]) for cell in result["cells"]] == [(2, 1), (2, 2)]
    assert result["cells"][0]["mean"] == pytest.approx(1) and all(
        cell["std"] > 0 for cell in result["cells"]
    )
    (row,) = result["phases"]
    assert sum(row["share"].values()) == pytest.approx(1) and set(row["ms"]) == {
        *latency.PHASES,
        "call",
    }
    seen = {row["phase"]: row["operations"] for row in result["profile"]}
    assert {"draft", "score", "select", "commit"} <= set(seen)
    assert sum(row["share"] for row in result["profile"]) == pytest.approx(1)
    assert (
        "`target`" in (tmp_path / "latency.md").read_text()
        and (tmp_path / "latency.png").stat().st_size > 5_000
    )


def test_phases_resume_with_the_method_that_was_stopped(tmp_path, monkeypatch):
    config, any_model = (
        _config(tmp_path, methods=("spectr", "otm_block")),
        types.SimpleNamespace(model=None),
    )
    made, calls = [], []
    timer = stopping(lambda: 1.0, calls, 7)  # Each method has five timers.

    def timers(method, *_):
        made.append(method.name)
        return dict.fromkeys((*latency.PHASES, "call"), timer)

    monkeypatch.setattr(latency, "phase_timers", timers)
    with pytest.raises(KeyboardInterrupt):
        latency.measure_phases(
            config, any_model, any_model, Journal(tmp_path, "latency", config, [])
        )
    rows = latency.measure_phases(
        config, any_model, any_model, Journal(tmp_path, "latency", config, [])
    )
    assert [row["method"] for row in rows] == ["spectr", "otm_block"] and len(calls) == 7 + 5
    assert sorted(made) == ["otm_block", "otm_block", "spectr"]


def test_a_draft_without_a_tokenizer_can_be_timed(toy, tmp_path, monkeypatch):
    """A draft that sees the features of a target is refused, because it cannot be called alone."""
    timed = []
    monkeypatch.setattr(
        latency, "measure_cells", lambda config, models, journal: timed.extend(models) or 1 / 0
    )
    models = str(toy.folder / "target.safetensors"), "smollm2-6m"
    with pytest.raises(ZeroDivisionError):
        latency.run(_config(toy.folder, models=models), tmp_path)
    assert [model.name for model in timed] == ["target", "smollm2_6m"]
    with pytest.raises(UserError, match="sees the features of a target, and can only draft for it"):
        latency.run(_config(toy.folder, models=(models[0], "smollm2-draft")), tmp_path / "other")


@pytest.mark.slow
def test_tables_are_written_where_profiling_is_not_allowed(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(
        latency, "measure_cells", lambda *_: [{"model": "target", "median_ms": 1.0}]
    )
    monkeypatch.setattr(latency, "_cell_table", lambda *_: "")
    monkeypatch.setattr(latency, "measure_phases", lambda *_: [])
    monkeypatch.setattr(latency, "plot", lambda *_: None)
    monkeypatch.setattr(jax.profiler, "trace", contextlib.nullcontext)
    latency.run(_config(toy.folder), tmp_path)
    assert "This machine does not allow profiling" in (tmp_path / "latency.md").read_text()


def test_the_papers_latency_tables_are_complete():
    assert {key: len(paper.LATENCY[key]) for key in paper.LATENCY} == {
        (model, length, batch): 2
        for model in ("97M", "6M")
        for length in (4, 8)
        for batch in (1, 2, 4, 8)
    }


def test_profiled_operations_belong_to_the_phase_of_their_scope():
    program = """
  %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(f)/while/body/draft/exp" source_line=3}
  ROOT %dot.7 = f32[8,8]{1,0} dot(%a, %b), metadata={op_name="jit(f)/while/body/score/dot_general"}
  %copy.3 = f32[8]{0} copy(%a)
"""
    phases = profile.scopes(program)
    assert phases == {"fusion.1": "draft", "dot.7": "score"}
    rows = profile.summary(
        {"fusion.1": (4, 0.002), "dot.7": (2, 0.006), "copy.3": (2, 0.002)}, phases, 2
    )
    assert [(row["phase"], row["kind"]) for row in rows] == [
        ("score", "dot"),
        ("draft", "fusion"),
        ("other", "copy"),
    ]
    assert [row["ms"] for row in rows] == pytest.approx([3, 1, 1]) and [
        row["operations"] for row in rows
    ] == [1, 2, 1]
    assert [row["share"] for row in rows] == pytest.approx([0.6, 0.2, 0.2])


def test_operation_names_of_a_gpu_profile_are_recognized():
    phases = {
        "loop_add_fusion.12": "draft",
        "custom-call.3": "score",
        "dynamic-update-slice.4": "commit",
    }
    seen = {
        "loop_add_fusion_12": (2, 0.003),
        "custom_call_3": (1, 0.002),
        "dynamic_update_slice_4": (1, 0.001),
    }
    rows = [(row["phase"], row["kind"]) for row in profile.summary(seen, phases, 1)]
    assert rows == [
        ("draft", "fusion"),
        ("score", "custom-call"),
        ("commit", "dynamic-update-slice"),
    ]


def test_control_flow_operations_are_left_out_of_the_profile():
    def event(name):
        return types.SimpleNamespace(stats=[("hlo_op", name)], duration_ns=1e9)

    containers = (
        "while.3",
        "while_3",
        "cond.9.clone.1",
        "cond_9_clone_1",
        "conditional.2",
        "call.5",
        "call_5",
    )
    work = ("fusion.7.clone", "custom-call.1", "custom_call_1")
    line = types.SimpleNamespace(
        events=[event(name) for name in (*containers, *work, "fusion.7.clone")]
    )
    data = types.SimpleNamespace(planes=[types.SimpleNamespace(lines=[line])])
    seen = {"fusion.7.clone": (2, 2.0), "custom-call.1": (1, 1.0), "custom_call_1": (1, 1.0)}
    assert profile.operation_times(data) == seen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runs": 0}, "runs=0: must be at least 1"),
        ({"dtype": "int4"}, "dtype='int4': must be one of"),
        ({"context": 30}, "context=30 and a call of 3 tokens: 33 tokens exceed the context 32"),
        ({"models": ("random:target_1m",)}, "unknown shape 'target_1m'"),
        ({"models": ("random:draft_2m", "random:draft_2m")}, "models='random:draft_2m'"),
        ({"methods": ("baseline",)}, "methods='baseline': drafts no chains of"),
    ],
)
def test_bad_configs_are_refused_before_any_work(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        latency.run(_config(toy.folder, **changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()
