"""Tests the table of tokens per call on small models with random weights."""

import dataclasses
import json
import shlex
import sys
import types

import numpy as np
import pytest
from flax import nnx

from helpers import ROOT, names_in, stopping
from spectr_jax.data.tokenizer import BOS, train_tokenizer
from spectr_jax.decoding import get_method
from spectr_jax.distillation.students import parameters
from spectr_jax.experiments import tokens_per_call
from spectr_jax.experiments.config import eval_config
from spectr_jax.experiments.measure import acceptance, report
from spectr_jax.experiments.measure import bench as benches
from spectr_jax.experiments.measure.bench import Bench
from spectr_jax.experiments.measure.measurement import (
    Contender,
    Measurement,
    policies_of,
    read_prompts,
)
from spectr_jax.experiments.paper import TOKENS_PER_CALL
from spectr_jax.experiments.tokens_per_call import run
from spectr_jax.loading.by_name import Trained, load, shape_name
from spectr_jax.loading.pairs import load_pair
from spectr_jax.models.formats.weights import save_weights
from spectr_jax.models.transformer import LADDER, Transformer
from spectr_jax.utils.config import config_hash
from spectr_jax.utils.errors import UserError


def _config(folder, **changes):
    config = eval_config()
    config.update(
        {
            "target": str(folder / "target.safetensors"),
            "drafts": (str(folder / "draft.safetensors"),),
            "prompts": str(folder / "prompts.txt"),
            "num_prompts": 7,
            "batch_size": 4,
            "max_new_tokens": 6,
            "seeds": (0, 1),
            "num_drafts": (1, 2),
            "draft_lengths": (2,),
            "methods": ("otm_block",),
            **changes,
        }
    )
    return config


@pytest.fixture(scope="module")
def whole(toy, tmp_path_factory):
    """Returns the folder of a table that was measured without a stop, and the table."""
    folder = tmp_path_factory.mktemp("table")
    return folder, run(_config(toy.folder), folder)


@pytest.mark.slow
@pytest.mark.xdist_group("table")  # These tests share programs and this table.
def test_the_table_is_written_as_json_markdown_and_png(whole):
    folder, first = whole
    assert [
        (row["algorithm"], row["num_drafts"], row["draft_length"]) for row in first["rows"]
    ] == [("baseline", 0, 0), ("speculative", 1, 2), ("otm_block", 2, 2)]
    assert all(row["tokens_per_second"] > 0 for row in first["rows"])
    assert first["rows"][0]["tokens_per_call"] == 1.0 and first["rows"][0]["speedup"] == 1.0
    assert all(row["tokens_per_call"] > 1.0 for row in first["rows"][1:])
    for row in first["rows"][1:]:
        # alpha is a mean over `nodes` draws, each accepted with probability alpha* at most.
        error = 4 * np.sqrt(0.25 / row["nodes"])
        if row["algorithm"] != "otm_block":  # It decides on whole paths, so it may exceed alpha*.
            assert row["acceptance"] <= row["optimal_acceptance"] + error
        if row["algorithm"] == "speculative":  # This is optimal for one draft.
            assert row["acceptance"] == pytest.approx(row["optimal_acceptance"], abs=error)
    assert json.loads((folder / "tokens_per_call.json").read_text()) == first
    assert {"command", "config_hash", "hardware", "commit", "jax"} <= first.keys()
    table = [
        line.split("|")
        for line in (folder / "tokens_per_call.md").read_text().splitlines()
        if line[:1] == "|"
    ]
    assert [cells[2].strip() for cells in table[2:]] == ["baseline", "speculative", "otm_block"]
    for cells, row in zip(table[2:], first["rows"], strict=True):
        assert cells[5].strip().startswith(f"{row['tokens_per_call']:.2f} ±")
    assert (folder / "tokens_per_call.png").stat().st_size > 5_000


def test_the_papers_value_is_cited_only_at_its_temperature():
    draft = types.SimpleNamespace(model=types.SimpleNamespace(config=LADDER["draft_2m"]))
    row = Contender(get_method("spectr", num_drafts=4, draft_length=8), draft)
    one = Measurement(
        tokens=12, calls=5, seconds=1.0, observed={"accepted": 1, "optimum": 1, "nodes": 2}
    )
    assert tokens_per_call._summary(row, [one], one, [one], 1.0)["paper"] == 2.41
    assert tokens_per_call._summary(row, [one], one, [one], 0.0)["paper"] is None


class _Bar:
    """A progress bar that records each description with its position."""

    def __init__(self, total, *args, **kwargs):
        self.total, self.at, self.said = total, 0, []
        self.bars.append(self)

    bars = []

    def update(self, by=1):
        self.at += by

    def set_description(self, words):
        self.said.append((self.at, words))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.slow
@pytest.mark.xdist_group("table")
def test_the_progress_bar_counts_every_program_and_batch(toy, tmp_path, monkeypatch):
    """Without alpha*, each row has one program. After a stop, the resumed bar reaches its total."""
    monkeypatch.setattr(tokens_per_call, "progress", _Bar)
    monkeypatch.setattr(_Bar, "bars", [])
    config = _config(
        toy.folder, optimal_acceptance=False, seeds=(0, 1), methods=("otm_block", "block")
    )
    monkeypatch.setattr(Bench, "run", stopping(Bench.run, [], 8))
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path)
    rows = run(config, tmp_path)["rows"]
    assert [row["algorithm"] for row in rows] == ["baseline", "speculative", "block", "otm_block"]
    assert all(
        "alpha*" not in line for line in (tmp_path / "tokens_per_call.md").read_text().splitlines()
    )
    assert all(0 < row["acceptance"] < 1 and row["optimal_acceptance"] is None for row in rows[1:])
    first, second = _Bar.bars
    # Each of the 4 rows has a program, a warm-up batch, and two batches on each of two seeds.
    assert first.total == second.total == 4 * (1 + 1 + 2 * 2)
    assert first.at == 4 + 4 + 3 * 2 and second.at == second.total
    words = dict(first.said)
    assert (
        words[0] == "compiling group 0: baseline K=0 L=0"
        and words[3] == "compiling group 0: otm_block K=2 L=2"
        and "seed 0" in words[8]
    )
    assert [at for at, _ in second.said[-8:]] == list(range(second.total - 16, second.total, 2))


def test_the_command_of_a_table_can_be_pasted_into_a_shell(monkeypatch):
    flags = ["--config.seeds=(0, 1)", "--config.target=it's here", "--config.methods=('spectr',)"]
    monkeypatch.setattr(sys, "argv", ["eval", *flags])
    assert shlex.split(report.provenance()["command"])[-3:] == flags


def test_means_over_seeds_and_provenance_are_formatted():
    assert report.mean_and_std([1.0, 2.0]) == "1.50 ± 0.71" and report.mean_and_std([1.5]) == "1.50"
    made = {
        "command": "python x.py",
        "commit": "0123456789abcdef-dirty",
        "jax": "1",
        "hardware": "a lamp",
    }
    assert (
        report.provenance_line(made)
        == "Made by `python x.py` (commit 0123456789ab-dirty, jax 1) on a lamp."
    )
    made |= {"commit": "unknown", "config_hash": "ff", "seconds": 2.4}
    assert (
        report.provenance_line(made)
        == "Made by `python x.py` (config ff, commit unknown, jax 1) on a lamp in 2 s."
    )


@pytest.mark.slow
def test_compiled_programs_are_not_compiled_again(toy, count_compilations):
    config = _config(toy.folder)
    target, (draft,) = load_pair(config.target, tuple(config.drafts), config.dtype)
    prompts = read_prompts(config, target.tokenizer)
    # This run compiles the small helper programs, which are not counted below.
    bench = Bench(config, target, [draft], prompts, None)
    bench.run(Contender(get_method("speculative", draft_length=1), draft), 0)
    block = Contender(get_method("block", draft_length=1), draft)
    observed = block._replace(observe=acceptance.observe_optimum)
    programs = {"block": block, "block, observed": observed}
    with count_compilations() as compiled:
        bench.compile(programs)
    assert len(compiled) == len(programs)
    with count_compilations() as compiled:
        for program in programs.values():
            bench.run(program, 0)
    assert not compiled


@pytest.mark.slow
@pytest.mark.xdist_group("table")
def test_a_stopped_table_resumes_without_measuring_twice(whole, toy, tmp_path, monkeypatch):
    """Nothing is measured twice, and the table equals one without stops, except for its times."""
    config, measured, measure = _config(toy.folder), [], Bench.run
    monkeypatch.setattr(benches, "CORES_OF_A_PROGRAM", 1)  # Lets programs compile in parallel.

    def stopped(bench, program, seed, batches=None):
        if batches is None:  # Warm-up runs give `batches`.
            if len(measured) in (4, 7):
                measured.append(None)
                raise KeyboardInterrupt
            measured.append((program.method.name, seed, program.observe.__name__))
        return measure(bench, program, seed, batches)

    monkeypatch.setattr(Bench, "run", stopped)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(config, tmp_path / "parts")
        assert not (tmp_path / "parts/tokens_per_call.json").exists()
    with (tmp_path / "parts/tokens_per_call.part.jsonl").open("a") as file:
        file.write('{"name": "draft, otm')  # Simulates a kill during a write.
    parts = run(config, tmp_path / "parts")
    taken = [each for each in measured if each]
    # Each of the 3 rows runs on each seed, and the 2 rows with drafts also run for alpha*.
    assert len(taken) == len(set(taken)) == 3 * len(config.seeds) + 2
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == [
        f"tokens_per_call.{kind}" for kind in ("json", "md", "png")
    ]
    for ours, theirs in zip(parts["rows"], whole[1]["rows"], strict=True):
        for name in ("tokens_per_call_by_seed", "acceptance", "optimal_acceptance", "nodes"):
            assert ours[name] == theirs[name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"config_hash": "other", "hardware": "abacus"}\n', "another config.*abacus"),
        ("{}}\n", "is damaged"),
    ],
    ids=["of another config", "damaged"],
)
def test_unusable_journals_are_refused_and_kept(toy, tmp_path, content, message):
    path = tmp_path / "tokens_per_call.part.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        run(_config(toy.folder), tmp_path)
    assert path.read_text() == content


def test_the_draft_temperature_is_that_of_the_drafts_alone():
    config = eval_config()
    config.update({"temperature": 0.7, "draft_temperature": 1.3})
    assert [policy.temperature for policy in policies_of(config, 2)] == [0.7, 1.3]
    config.draft_temperature = None
    assert [policy.temperature for policy in policies_of(config, 2)] == [0.7, 0.7]


def test_tables_of_configs_without_model_parallel_are_recognised():
    """Configs of older versions lack the field."""
    config = eval_config()
    current = config_hash(config)
    with config.unlocked():
        del config.model_parallel
    assert config_hash(config) == current
    changed = eval_config()
    changed.model_parallel = 2
    assert config_hash(changed) != current


@pytest.mark.slow
@pytest.mark.xdist_group("table")
def test_drafts_of_the_same_name_are_measured_separately(toy, tmp_path):
    """The second draft is the target itself, under the name of the first draft."""
    (tmp_path / "draft.safetensors").write_bytes((toy.folder / "target.safetensors").read_bytes())
    (tmp_path / "tokenizer.model").write_bytes((toy.folder / "tokenizer.model").read_bytes())
    drafts = tuple(str(folder / "draft.safetensors") for folder in (toy.folder, tmp_path))
    one = {"num_drafts": (1,), "optimal_acceptance": False, "seeds": (0,)}
    _, other, itself = run(_config(toy.folder, drafts=drafts, **one), tmp_path / "run")["rows"]
    assert itself["tokens_per_call"] > other["tokens_per_call"] and itself["acceptance"] == 1.0


@pytest.mark.slow
@pytest.mark.xdist_group("table")
def test_batch_size_does_not_change_tokens_or_calls(toy):
    config = _config(toy.folder)
    target, (draft,) = load_pair(config.target, config.drafts, config.dtype)
    method = get_method("speculative", draft_length=2)
    program = Contender(method, draft, acceptance.observe_accepted)
    results = []
    for config.batch_size in (4, 7):
        prompts = read_prompts(config, target.tokenizer)
        bench = Bench(config, target, [draft], prompts, None)
        results.append([bench.run(program, seed) for seed in config.seeds])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.tokens, ours.calls) == (
            theirs.tokens,
            theirs.calls,
        ) and ours.tokens > ours.calls


def test_prompts_are_cut_and_padded(toy):
    config = _config(toy.folder, prompt_tokens=3)
    prompts = read_prompts(config, load(config.target).tokenizer)
    assert prompts.tokens.shape == (2, 4, 4) and prompts.real == 7
    assert np.all(prompts.tokens[..., 0] == BOS)
    assert prompts.lengths.reshape(-1).tolist() == [4] * 7 + [1]


def test_a_workdir_of_another_config_is_refused(toy, tmp_path):
    (tmp_path / "tokens_per_call.json").write_text('{"config_hash": "other"}')
    with pytest.raises(UserError, match="another config"):
        run(_config(toy.folder), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens_per_call.json"]


def test_models_of_different_vocabularies_are_refused(toy, tmp_path):
    shifted = ["".join(chr(ord(letter) + 300) for letter in line) for line in toy.prompts * 20]
    proto = train_tokenizer(shifted, tmp_path / "tokenizer.model", 283).proto
    save_weights(tmp_path / "other", Transformer(toy.shape, rngs=nnx.Rngs(0)), proto, {})
    with pytest.raises(
        UserError,
        match=r"different vocabularies of 283 and 283 tokens: \d\d of 283 common ids differ, .* share one",
    ):
        run(_config(toy.folder, drafts=(str(tmp_path / "other.safetensors"),)), tmp_path / "run")


def test_a_model_next_to_the_wrong_tokenizer_is_refused(toy, tmp_path):
    train_tokenizer([line[::-1] for line in toy.prompts * 20], tmp_path / "tokenizer.model", 283)
    (tmp_path / "m.safetensors").write_bytes((toy.folder / "target.safetensors").read_bytes())
    with pytest.raises(
        UserError, match="was trained with another tokenizer than the one next to it"
    ):
        load(str(tmp_path / "m.safetensors"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 10}, "num_prompts=10"),
        ({"max_new_tokens": 30}, "exceed the context 32 of 'target'"),
        ({"methods": ("speck",)}, "unknown method 'speck'"),
        ({"methods": ("baseline",)}, "methods='baseline': does not draft chains of 2 tokens"),
        ({"methods": ("block",), "num_drafts": (2,)}, "methods='block': drafts only one chain"),
        ({"dtype": "int4"}, "dtype='int4': must be one of"),
        ({"target": "none"}, "no model at 'none'"),
        ({"prompts": "/nowhere.txt"}, "no text file matches '/nowhere.txt'"),
    ],
)
def test_bad_configs_are_refused_before_any_work(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run(_config(toy.folder, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_published_models_have_the_shapes_of_the_ladder():
    for name in ("2m", "6m", "20m"):
        trained = load(name)
        assert dataclasses.replace(trained.model.config, dropout=0.0) == LADDER[f"draft_{name}"]
        assert trained.tokenizer.vocab_size == 8192


def test_the_97m_ladder_config_loads_matching_models(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = names_in("configs/ladder.py").get_config("97m")
    tokens_per_call.check_eval_config(config)
    target = load(config.target, config.dtype)
    assert (
        dataclasses.replace(target.model.config, dropout=0.0, dtype="float32")
        == LADDER["target_97m"]
    )
    assert target.tokenizer.proto == load(config.drafts[0]).tokenizer.proto


def test_the_smollm2_ladder_config_loads_its_drafts(monkeypatch):
    """The drafts have SmolLM2's vocabulary, but their heads have logits for fewer tokens."""
    monkeypatch.chdir(ROOT)
    config = names_in("configs/ladder.py").get_config("smollm2")
    tokens_per_call.check_eval_config(config)
    shapes = [load(name, config.dtype).model.config for name in config.drafts]
    assert {(shape.vocab_size, shape.head_tokens) for shape in shapes} == {(49_152, 8_192)}
    assert [round(parameters(shape) / 1e6) for shape in shapes] == [6, 9]


def test_shape_names_match_the_paper_table():
    ladder = [
        Trained(name, types.SimpleNamespace(config=shape), None) for name, shape in LADDER.items()
    ]
    drafts = dict.fromkeys(draft for draft, *_ in TOKENS_PER_CALL)
    assert [shape_name(trained) for trained in ladder] == [*drafts, "97M"]
    # A model of another class keeps its own name.
    assert shape_name(Trained("mine", object(), None)) == "mine"


def test_markdown_table_is_aligned():
    table = report.markdown_table(["a", "K"], [["x", "1"], ["yyyy", "22"]])
    assert table == "| a    |   K |\n| ---- | --: |\n| x    |   1 |\n| yyyy |  22 |"
