"""Tests the search for the fastest method: at toy size, and with given speeds."""

import json
import re

import pytest

from helpers import names_in, stopping
from spectr_jax.decoding import get_method
from spectr_jax.experiments import auto
from spectr_jax.experiments.config import auto_config
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.experiments.measure.measurement import Measurement
from spectr_jax.utils.errors import UserError


def _config(folder, **changes):
    config = auto_config()
    config.update(
        {
            "target": str(folder / "target.safetensors"),
            "draft": str(folder / "draft.safetensors"),
            "prompts": str(folder / "prompts.txt"),
            "num_prompts": 4,
            "batch_size": 2,
            "max_new_tokens": 5,
            "prompt_tokens": 4,
            **changes,
        }
    )
    return config


@pytest.mark.slow
def test_a_stopped_run_resumes_and_writes_table_and_answer(toy, tmp_path, monkeypatch):
    """The run is stopped while it measures methods and target calls, and resumes each time. The
    test sets the time of each journal entry to one hour, which the result must include."""
    decoded, calls = [], []
    monkeypatch.setattr(Bench, "run", stopping(Bench.run, decoded, 6))
    monkeypatch.setattr(auto, "call_timer", stopping(auto.call_timer, calls, 2))
    # `lookup` needs no draft model.
    config = _config(toy.folder, candidates=("block chain:2", "lookup chain:1"), seeds=(0, 1))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            auto.run(config, tmp_path)
    journal = tmp_path / "auto.part.jsonl"
    text, measured = re.subn(r'"seconds": [\d.]+}\n', '"seconds": 3600}\n', journal.read_text())
    journal.write_text(text)
    result = auto.run(config, tmp_path)
    # Each start warms up the methods that it has to measure: three, and then the same three.
    assert len(decoded) == (3 + 3) + (3 + 4)
    assert measured == 6 and result["seconds"] >= 6 * 3600 and not journal.exists()
    assert json.loads((tmp_path / "auto.json").read_text()) == result
    assert {row["method"] for row in result["rows"]} == {"baseline", "block", "lookup"}
    assert all(row["measured_per_second"] > 0 for row in result["rows"])
    assert list(result["target_ms"]) == ["1", "2", "3"] and min(result["target_ms"].values()) > 0
    page = (tmp_path / "auto.md").read_text()
    assert result["answer"] in page
    trees = re.findall(r"^\| `\w+` +\| +(\S+) \|", page, re.MULTILINE)
    assert trees == [row["shape"] for row in result["rows"]]


# Tokens per second on each seed, on a machine whose speed changes from seed to seed.
SPEEDS = {"chain:1": (0.5, 1.0, 1.5), "-": (1.0, 2.0, 3.0), "2,1": (6.0, 2.0, 6.0)}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Returns the rows of methods with `SPEEDS`."""
    shapes = {0: "-", 1: "chain:1", 4: "2,1"}

    def measured(_, contender, seed, *__, **___):
        size = contender.method.tree.size
        return Measurement(60, 30 - 5 * size, 60 / SPEEDS[shapes[size]][seed], {})

    monkeypatch.setattr(Bench, "run", measured)
    monkeypatch.setattr(Bench, "compile", lambda *_: None)
    config = _config(tmp_path, candidates=("block chain:1", "otm_block 2,1"))
    bench = Bench(config, None, [None], None, Journal(tmp_path, "auto", config, []))
    return auto.measure(bench, auto.candidates(config))


def test_a_speedup_is_the_median_of_the_ratios_on_the_same_seed(rows):
    by_shape = {row["shape"]: row for row in rows}
    found = {shape: row["speedup"] for shape, row in by_shape.items()}
    assert found == {"2,1": 2, "-": 1, "chain:1": 0.5}
    assert by_shape["2,1"]["speedup_by_seed"] == [6, 1, 2]
    assert by_shape["2,1"]["measured_per_second"] == pytest.approx(6)
    assert by_shape["2,1"]["measured_per_call"] == 6


def test_the_fastest_method_comes_first_and_is_recommended(rows):
    assert [row["method"] for row in rows] == ["otm_block", "baseline", "block"]
    line = 'Use `get_method("otm_block", tree="2,1")`: 6.0 tokens/s, 2.00 x the baseline.'
    assert auto.answer(rows) == line
    assert auto.answer(rows[1:]).startswith("Use the baseline: ")


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("block chain:3", 'get_method("block", draft_length=3)'),
        ("otm_layer 4x4", 'get_method("otm_layer", tree="4x4")'),
        ("gbv 3x2", 'get_method("gbv", num_drafts=3, draft_length=2)'),
        ("recycle recall:8", 'get_method("recycle", tree="recall:8")'),
        ("lookup", 'get_method("lookup")'),
    ],
)
def test_the_recommended_line_makes_the_method_that_was_measured(tmp_path, spec, code):
    method = auto.candidates(_config(tmp_path, candidates=(spec,)))[spec]
    assert auto._code(spec, method) == code
    assert eval(code, {"get_method": get_method}) == method


def test_the_default_grid_has_twelve_methods_and_the_baseline():
    config = names_in("configs/auto.py").get_config()
    auto.check_auto_config(config)
    assert list(auto.candidates(config)) == ["baseline", *config.candidates]
    assert len(config.candidates) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": ("block 2,1",)}, "candidates='block 2,1': 'block' does not draft the tree"),
        ({"candidates": ("otm 2;1",)}, "tree='2;1': is unknown"),
        ({"candidates": ("block 1", "x 1")}, "unknown method 'x'"),
        ({"candidates": ("baseline",)}, "candidates='baseline': drafts nothing"),
        (
            {"candidates": ("block chain:2", "block 1,1")},
            "candidates='block 1,1': is the same method as 'block chain:2'; leave one out",
        ),
        ({"num_prompts": 0}, "num_prompts=0: must be at least 1"),
    ],
)
def test_bad_configs_are_refused_before_any_work(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        auto.run(_config(toy.folder, **changes), tmp_path / "new")
    assert not (tmp_path / "new").exists()
