"""All programs run a user's own method that `--import` registers, such as the method of
CONTRIBUTING.md."""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from helpers import ROOT
from spectr_jax import decoding, transport
from spectr_jax.decoding.drafters import DraftModel, FeatureModel
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.verifiers import Block, FromTarget, MultiPath, TokenByToken
from spectr_jax.experiments import auto, tokens_per_call, trees
from spectr_jax.experiments.config import auto_config, eval_config, trees_config
from spectr_jax.experiments.measure.acceptance import PairAcceptance
from spectr_jax.experiments.planning.on_tree import on_tree
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel
from spectr_jax.testing import methods as checks
from spectr_jax.utils.errors import UserError

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
PLAN = re.search(r"## How to add a plan\n.*?```python\n(.*?)```", GUIDE, re.DOTALL)[1]
TOY = {"num_prompts": 4, "batch_size": 2, "prompt_tokens": 4, "max_new_tokens": 5, "seeds": (0,)}


def _example(part):
    """Returns the code of a section of the guide."""
    block = rf"## How to add a {part}\n.*?\n\n((?: {{4}}[^\n]*\n|\n)+)"
    return textwrap.dedent(re.search(block, GUIDE, re.DOTALL)[1])


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with two code blocks of the guide as modules, without their own checks."""
    (tmp_path / "lazy.py").write_text(PLAN)
    method = "".join(
        line for line in _example("method").splitlines(True) if not line.startswith("testing.")
    )
    assert "decoding.register(" in method
    plan = (
        "import lazy\nfrom spectr_jax import transport\n\ntransport.register('lazy', lazy.Lazy)\n"
    )
    (tmp_path / "lazy_chains.py").write_text(plan + method)
    return tmp_path


def _run(folder, program, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", program, "--import=lazy_chains", *arguments]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_sample_runs_an_imported_method(folder, toy):
    models = f"--target={toy.folder}/target", f"--draft={toy.folder}/draft"
    options = "--method=lazy", "--draft_length=2", "--max_new_tokens=5", "--prompt=draft"
    assert "lazy" in _run(folder, "spectr_jax.sample", *models, *options)


@pytest.mark.slow
def test_eval_compares_an_imported_method(folder, toy):
    fields = {
        **TOY,
        "methods": ("lazy",),
        "optimal_acceptance": False,
        "num_drafts": (1,),
        "draft_lengths": (2,),
        "drafts": (f"{toy.folder}/draft",),
    }
    fields |= {"target": f"{toy.folder}/target", "prompts": f"{toy.folder}/prompts.txt"}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    table = _run(
        folder, "spectr_jax.eval", f"--config={ROOT}/configs/demo.py", "--workdir=table", *flags
    )
    rows = json.loads((folder / "table/tokens_per_call.json").read_text())["rows"]
    assert [row["algorithm"] for row in rows] == [
        "baseline",
        "speculative",
        "lazy",
    ] and "lazy" in table
    assert 1 <= rows[2]["tokens_per_call"] <= 3 and 0 < rows[2]["acceptance"] <= 1


@pytest.fixture
def registered(folder, monkeypatch):
    monkeypatch.setattr(transport, "PLANS", dict(transport.PLANS))
    monkeypatch.setattr(decoding.methods, "METHODS", dict(decoding.METHODS))
    monkeypatch.syspath_prepend(folder)
    for name in ("lazy", "lazy_chains"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("lazy_chains")


def test_auto_takes_registered_methods(registered):
    config = auto_config()
    config.candidates = ("lazy chain:2", "lazy chain:1")
    methods = auto.candidates(config)
    assert [method.tree.size for method in methods.values()] == [0, 2, 1]
    assert methods["lazy chain:2"].name == "lazy"


def test_the_trees_program_predicts_registered_methods(registered):
    config = trees_config()
    config.update(
        {"methods": ("lazy", "block"), "sizes": (2, 3), "extra_trees": ("2",), "exit_layer": 0}
    )
    trees.check_trees_config(config)
    carriers = np.array([[1, 0], [0.4, 0.6]])
    rows = trees.table_rows(config, PairAcceptance({}, {}, {"lazy": carriers}, np.nan))
    found = [(row.size, row.method.name, row.shape, row.theory) for row in rows[1:]]
    assert [each[:3] for each in found] == [
        (n, name, "chain") for n in (2, 3) for name in ("lazy", "block")
    ]
    assert [each[3] for each in found] == [
        pytest.approx(1 + 0.6 + 0.36),
        None,
        pytest.approx(2.176),
        None,
    ]


def test_a_method_has_the_name_it_is_registered_under(monkeypatch):
    """Tables identify methods by name, but a factory may return a method that has another name."""
    monkeypatch.setattr(decoding.methods, "METHODS", dict(decoding.METHODS))
    decoding.register("mine", lambda *, tree="2,1": decoding.get_method("otm", tree=tree))
    mine = decoding.get_method("mine")
    assert mine.name == "mine" and mine.verifier.plan.name == "otm"
    assert on_tree("mine", mine.tree) == mine
    decoding.register("wrong", lambda: "otm")
    with pytest.raises(UserError, match="method 'wrong': its factory returns 'otm'; return a Met"):
        decoding.get_method("wrong")


def test_block_verification_refuses_plans_without_a_winner():
    with pytest.raises(UserError, match="plan='kseq'"):
        Block(transport.get("kseq"))


def test_a_verifier_refuses_trees_that_it_is_not_exact_for():
    with pytest.raises(UserError, match=r"method 'bad': parents=\(0, 1, 1\)"):
        decoding.Method("bad", decoding.tree.parse("1,2"), MultiPath())


@pytest.mark.slow
def test_the_verifier_of_contributing_md_passes_its_checks(monkeypatch):
    monkeypatch.setattr(decoding.methods, "METHODS", dict(decoding.METHODS))
    monkeypatch.setattr(checks, "GENERATIONS", 24_000)
    exec(_example("verifier"), {"__name__": "guide"})
    assert "one_token" in decoding.methods.METHODS


@pytest.mark.slow
def test_the_drafter_of_contributing_md_passes_its_checks(monkeypatch):
    monkeypatch.setattr(checks, "GENERATIONS", 24_000)
    code = _example("drafter")
    assert sum(bool(line) for line in code.splitlines()) <= 30
    exec(code, names := {"__name__": "guide"})
    target = TableModel(np.eye(5)[(np.arange(25).reshape(5, 5) + 1) % 5])  # Counts modulo 5.
    method = decoding.Method("", decoding.tree.chain(4), FromTarget(), names["Followers"]())
    out = generate(jax.random.key(0), method, target, None, [[0]], [1], 45)
    assert out.target_calls[0] == 5 + 40 // 5  # From the sixth call on, it drafts all four.


@pytest.mark.slow
def test_the_drafting_rule_of_contributing_md_passes_its_checks(monkeypatch):
    code = _example("drafting rule")
    assert sum(bool(line) for line in code.splitlines()) <= 30
    monkeypatch.setattr(checks, "GENERATIONS", 24_000)
    exec(code, names := {"__name__": "guide"})
    drawn = names["plan"].rule.draw(None, np.float32([[0.1, 0.3, 0.6]]), np.array([2]))
    np.testing.assert_array_equal(drawn, [[2, 1]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: decoding.Method("bad", "4,2", TokenByToken(transport.get("kseq"))), "the tree is"),
        (lambda: TokenByToken("maximal"), "plan='maximal': must be a Plan"),
        (lambda: Block("maximal"), "plan='maximal': names no winner"),
        (lambda: decoding.register(7, TokenByToken), "name=7: must be a string"),
        (lambda: transport.register(["a"], TokenByToken), r"name=\['a'\]: must be a string"),
    ],
)
def test_parts_of_another_kind_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_a_missing_option_is_named(monkeypatch):
    monkeypatch.setattr(decoding.methods, "METHODS", dict(decoding.METHODS))
    decoding.register("needs", lambda *, draft_length: None)
    with pytest.raises(UserError, match="method 'needs': needs the option 'draft_length'"):
        decoding.get_method("needs")


def test_a_drafter_of_ones_own_runs_a_draft_with_features():
    class Own(DraftModel):
        pass

    class Seeing(TableModel):
        features_seen = features_shown = 4

    method = decoding.Method("", decoding.tree.chain(2), TokenByToken(transport.get("kseq")))
    draft = freeze(Seeing(np.full((3, 3, 3), 1 / 3)))
    assert isinstance(method.drafter_for(draft), FeatureModel)
    assert dataclasses.replace(method, drafter=Own()).drafter_for(draft) == Own()


def test_a_plan_is_refused_as_a_verifier():
    with pytest.raises(UserError, match="method 'bad': the verifier is a KSeq"):
        decoding.Method("bad", decoding.tree.parse("1,2"), transport.get("kseq"))


def test_eval_refuses_methods_without_a_draft_model(tmp_path):
    config = eval_config()
    config.methods = ("self_speculative",)
    with pytest.raises(UserError, match="methods='self_speculative': uses no draft model"):
        tokens_per_call.run(config, tmp_path)


def test_conflicting_and_too_large_trees_are_refused():
    with pytest.raises(UserError, match="tree='4,2'"):
        decoding.get_method("otm", tree="4,2", num_drafts=2)
    with pytest.raises(
        UserError, match="a tree of 100,000 nodes is too large; give at most 10,000"
    ):
        decoding.get_method("spectr", num_drafts=1_000, draft_length=100)
