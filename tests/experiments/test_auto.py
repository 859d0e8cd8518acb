"""The search for the fastest method: end to end at toy size, and predictions from given times and
acceptance."""

import json
import re
import types

import numpy as np
import pytest

from spectr_jax.decoding.methods import on_tree
from spectr_jax.decoding.tree import Tree, chain, prefix_tree
from spectr_jax.experiments import auto, call_parts
from spectr_jax.experiments.config import auto_config
from spectr_jax.experiments.measure import bench, measurement
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Measurement
from spectr_jax.experiments.planning import tree_search
from spectr_jax.utils.errors import UserError


def _config(folder, **changes):
    config = auto_config()
    config.update(
        {"target": str(folder / "target.safetensors"), "draft": str(folder / "draft.safetensors")}
    )
    config.update(
        {
            "prompts": str(folder / "prompts.txt"),
            "num_prompts": 4,
            "batch_size": 2,
            "max_new_tokens": 5,
        }
    )
    config.update(
        {
            "methods": ("block", "gsd"),
            "num_drafts": (2,),
            "draft_lengths": (2,),
            "size": 2,
            "tries": 1,
        }
    )
    config.update({"prompt_tokens": 4, **changes})
    return config


def _stopping(function, calls, *at):
    """Returns `function`, but its calls whose numbers are in `at` stop the run. `calls` collects the
    arguments of all calls."""

    def wrapped(*args, **kwargs):
        calls.append(args)
        if len(calls) in at:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return wrapped


@pytest.mark.slow
def test_the_table_and_the_answer_are_written(toy, tmp_path, monkeypatch):
    """The run is stopped while it measures acceptance, times and candidates, and resumes each time.
    Each entry of the journal is edited to have taken an hour."""
    calls, phases, tokens, decoded = [], [], [], []
    measure = _stopping(measurement.measure, decoded, 1, 8)  # The eighth is the last one.
    monkeypatch.setattr(
        bench, "measurement", types.SimpleNamespace(**{**vars(measurement), "measure": measure})
    )
    monkeypatch.setattr(call_parts, "call_timer", _stopping(call_parts.call_timer, calls))
    monkeypatch.setattr(call_parts, "phase_timers", _stopping(call_parts.phase_timers, phases))
    monkeypatch.setattr(call_parts, "token_timer", _stopping(call_parts.token_timer, tokens, 1))
    config = _config(toy.folder, methods=("block",), seeds=(0, 1))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            auto.run(config, tmp_path)
    journal = tmp_path / "auto.part.jsonl"
    text, measured = re.subn(r'"seconds": [\d.]+}\n', '"seconds": 3600}\n', journal.read_text())
    journal.write_text(text)
    result = auto.run(config, tmp_path)
    # `speculative` is timed too, for the time of a start.
    assert (len(calls), len(phases), len(tokens), len(decoded)) == (3, 2 + 1, 2 + 1, 8 + 2)
    assert measured == 14 and result["seconds"] >= 14 * 3600 and not journal.exists()
    assert json.loads((tmp_path / "auto.json").read_text()) == result
    methods = [row["method"] for row in result["rows"]]
    assert methods[0] == "baseline" and set(methods[1:]) == {"block"}
    assert all(
        row["measured_per_second"] > 0 and row["tokens_per_second"] > 0 for row in result["rows"]
    )
    assert (
        result["answer"].startswith("Use ")
        and result["answer"] in (tmp_path / "auto.md").read_text()
    )
    speeds = [row["tokens_per_second"] for row in result["predicted"]]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == 1 + 2  # Chains of 1 and 2.


def _given(target, accepted=0.8, level=1.0):
    """Returns the acceptance `accepted` for one and for two drafts, and the times of a machine where
    a call on n tokens takes `target(n)` seconds."""
    carriers = np.array([[1, 0, 0], [1 - accepted, accepted, 0], [1 - accepted, 0, accepted]])
    acceptance = auto.Acceptance({"speculative": carriers}, 60.0, {})
    times = call_parts.Times(
        target, 1.0, (0.0, 0.0), lambda _: level, lambda _: level, {"speculative": lambda _: 0.0}
    )
    return acceptance, times


def _found(target, tmp_path, **given):
    config = _config(
        tmp_path,
        methods=("speculative",),
        draft_lengths=(1, 2, 4),
        num_drafts=(1,),
        size=8,
        batch_size=1,
    )
    return auto.candidates(config, *_given(target, **given))


def test_long_drafts_win_where_scoring_is_free_and_none_where_it_is_expensive(tmp_path):
    free = _found(lambda _: 100.0, tmp_path)
    assert [each.shape for each in free] == ["1,1,1,1", "1,1,1", "1,1", "1", "-"]
    assert free[0].tokens_per_call == pytest.approx(sum(0.8**n for n in range(5)))
    # Each call drafts four levels of 1 second and scores in 100.
    assert free[0].tokens_per_second == pytest.approx(free[0].tokens_per_call / 104)
    expensive = _found(lambda count: 100.0 * count, tmp_path)
    assert expensive[0].shape == "-"
    assert expensive[0].tokens_per_second == pytest.approx(1 / 100)


@pytest.mark.slow
def test_methods_without_a_table_are_replayed(toy, tmp_path):
    config = _config(
        toy.folder,
        methods=("otm_layer", "traversal"),
        draft_lengths=(1, 2, 3),
        num_drafts=(1, 2),
        size=4,
    )
    target, drafts, prompts = measurement.open_table(config, tmp_path, "auto", (config.draft,))
    table = bench.Bench(config, target, drafts, prompts, Journal(tmp_path, "auto", config, []))
    acceptance = auto.measure_acceptance(table)
    shapes = ["2", "2,1"]  # Two chains of three have more than four nodes.
    assert {name: list(found) for name, found in acceptance.replayed.items()} == dict.fromkeys(
        config.methods, shapes
    )
    times = call_parts.Times(
        lambda _: 100.0,
        1.0,
        (0.0, 0.0),
        *[lambda _: 0.0] * 2,
        dict.fromkeys(config.methods, lambda _: 0.0),
    )
    found = {
        (each.method.name, each.shape): each for each in auto.candidates(config, acceptance, times)
    }
    assert len(found) == 1 + 2 * len(shapes)
    assert {name for name, _ in found} == {"baseline", *config.methods}
    for (_, shape), each in found.items():
        tree = each.method.tree
        assert 1 <= each.tokens_per_call <= tree.height + 1
        assert not tree.size or ",".join(map(str, tree_search.branching_of(tree))) == shape
    assert found["otm_layer", "2,1"].tokens_per_call > 1


def test_the_best_of_each_method_is_tried_and_then_the_best_of_the_rest(tmp_path):
    found = _found(lambda _: 100.0, tmp_path)
    config = _config(tmp_path, tries=2)
    assert [each.shape for each in auto.to_try(config, found)] == ["-", "1,1,1,1", "1,1,1"]


def test_the_answer_can_be_pasted():
    rows = [{"method": "baseline", "measured_per_second": 10.0, "speedup": 1.0}]
    row = {"measured_per_second": 25.0, "speedup": 2.5}

    def tried(name, shape, tree):
        method = on_tree(name, tree)
        return {
            **row,
            "method": name,
            "options": auto._options(auto.Candidate(method, shape, 1.0, 1.0)),
        }

    assert (
        auto.answer([*rows, tried("otm_block", "2,1", prefix_tree(2, 1))])
        == 'Use `get_method("otm_block", tree="2,1")`: 25.0 tokens/s, 2.50 x the baseline.'
    )
    assert auto.answer([*rows, tried("block", "1,1", chain(2))]).startswith(
        'Use `get_method("block", draft_length=2)`'
    )
    assert "tree=Tree((0, 0, 1, 2))" in auto.answer(
        [*rows, tried("gsd", "optimal of 4", Tree((0, 0, 1, 2)))]
    )
    assert auto.answer([*rows, {**row, "method": "gsd", "options": "", "speedup": 0.5}]).startswith(
        "Use the baseline"
    )


def test_ratios_are_of_what_ran_on_the_same_seed(tmp_path, monkeypatch):
    """The machine is three times as slow on the second seed, and ten times on the third seed."""
    found = auto.to_try(_config(tmp_path, tries=1), _found(lambda _: 100.0, tmp_path))

    def measured(method, target, draft, prompts, config, seed, **_):
        seconds = (1, 3, 10)[seed] * (2 if method.tree.size else 8)
        return Measurement(80, 80 if not method.tree.size else 40, seconds, {})

    given = types.SimpleNamespace(measure=measured, compile_program=lambda *_: None)
    monkeypatch.setattr(bench, "measurement", given)
    config = _config(tmp_path, seeds=(0, 1, 2))
    table = bench.Bench(config, None, [None], None, Journal(tmp_path, "auto", config, []))
    baseline, best = auto.try_all(table, found)
    assert baseline["speedup"] == 1 and best["speedup"] == 4 and best["measured_per_call"] == 2
    assert baseline["measured_per_second"] == pytest.approx(80 / 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ("greedy_drafts",)}, "methods='greedy_drafts': cannot be predicted"),
        ({"methods": ("baseline",)}, "methods='baseline': cannot be predicted"),
        ({"methods": ("otm", "x")}, "unknown method 'x'"),
        ({"tries": 0}, "tries=0: must be at least 1"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_bad_configs_are_refused_before_any_work(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        auto.run(_config(toy.folder, **changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()
