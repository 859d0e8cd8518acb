"""The public checks accept the plan of CONTRIBUTING.md and report each error of wrong plans."""

import dataclasses
import pathlib
import re
import types

import jax
import numpy as np
import pytest

from spectr_jax import decoding, testing, transport
from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.verifiers import TokenByToken
from spectr_jax.testing import methods as checks
from spectr_jax.utils import registry
from spectr_jax.utils.errors import UserError

pytestmark = [pytest.mark.xdist_group("testing"), pytest.mark.optimized]  # They share programs.

GUIDE = pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md"
PATTERN = r"## How to add a plan\n.*?```python\n(.*?)```"
EXAMPLE = re.search(PATTERN, GUIDE.read_text(), re.DOTALL)[1]


@pytest.fixture(autouse=True)
def _registered_here_only(monkeypatch):
    monkeypatch.setattr(transport, "PLANS", dict(transport.PLANS))
    monkeypatch.setattr(decoding.methods, "METHODS", dict(decoding.METHODS))


def _lazy(change=("", "")):
    """Registers and returns the plan of the guide, with one string of its code replaced."""
    assert change[0] in EXAMPLE
    exec(EXAMPLE.replace(*change), names := {"__name__": __name__})
    transport.register("lazy", names["Lazy"])
    return transport.get("lazy", w=0.25)


def test_the_plan_of_contributing_md_passes_check_plan():
    testing.check_plan(_lazy())


WRONG = {
    "the residual is q": (
        ("np.maximum(q - p, 0)\n", "q\n"),
        r"the emitted distribution is not q for p = \[0\.75, 0\.25\], q = \[0\.4, 0\.6\] and "
        r"k = 1: `pmf` averages .* \[0\.435, 0\.565\], off by 0\.035 at token 0",
    ),
    "the acceptance counts a draft twice": (
        ("** (k - 1)", "** k"),
        r"the acceptance is wrong for p = \[0\.75, 0\.25\], q = \[0\.4, 0\.6\] and k = 1: "
        r"0\.521875, by enumeration of `pmf` 0\.5, off by 0\.0219",
    ),
    "select draws another mixture": (
        ("jax.random.uniform(coin_key) < self.w", "jax.random.uniform(coin_key) < 1 - self.w"),
        r"`select` does not draw from `pmf` for p = \[0\.25.* and 1 valid drafts \(\d,\): \[.*\] "
        r"in 40,000 draws, `pmf` gives \[.*\], off by 0\.\d+ at token \d \(chi-square: p-value 0\)",
    ),
    "select uses an invalid draft": (
        ("drafts[jnp.argmax(valid)]", "drafts[0]"),
        r"`select` does not draw from `pmf` for .* and 1 valid drafts",
    ),
    "select emits impossible tokens": (
        ("draw(token_key, rest)", "draw(token_key, rest + 0.01)"),
        r"`select` emits token \d, which has probability 0, \d+ of 40000 times for p = ",
    ),
    "pmf returns a number": (
        ("return self.w * coupled + (1 - self.w) * q\n", "return 0\n"),
        r"`pmf` returns an array of int64 of shape \[\], not float64 of \[\d\]",
    ),
    "pmf returns float32": (
        ("return self.w * coupled + (1 - self.w) * q\n", "return np.float32(q)\n"),
        r"`pmf` returns an array of float32 of shape \[\d\], not float64 of \[\d\]",
    ),
    "select returns floats": (
        ("draw(token_key, rest)", "1.0 * draw(token_key, rest)"),
        "`select` returns a token of float32, not int32",
    ),
    "a matrix product in default precision": (
        ("jnp.maximum(q - p, 0), q), q)", "jnp.maximum(q - p, 0), q), jnp.eye(len(q)) @ q)"),
        r"`select` multiplies matrices of float32 in default precision at V = 6, which TPUs and "
        r"GPUs round",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_check_plan_reports_each_error(case):
    change, message = WRONG[case]
    with pytest.raises(AssertionError, match=f"plan 'lazy': {message}"):
        testing.check_plan(_lazy(change))


def test_check_nonsense_reports_an_invalid_draft_that_is_accepted(monkeypatch):
    def select(self, key, p, q, drafts, valid):
        token = original(self, key, p, q, drafts, valid).token
        return transport.Choice(token, jax.numpy.any(drafts == token))

    plan, original = transport.get("naive"), transport.Plan.select
    monkeypatch.setattr(transport.Plan, "select", select)
    message = r"`select` says accepted = True of token \d under jit for p = .* usable drafts"
    with pytest.raises(AssertionError, match=f"plan 'naive': {message}"):
        testing.check_nonsense(plan)


class _Late(TokenByToken):
    """A wrong verifier that reads the logits of the previous node."""

    def __call__(self, key, scored):
        late = jax.numpy.roll(scored.logits, 1, axis=0)
        return super().__call__(key, dataclasses.replace(scored, logits=late))


def test_method_checks_report_wrong_outputs_and_greedy_tokens(monkeypatch):
    monkeypatch.setattr(checks, "GENERATIONS", 40_000)
    plan = _lazy(("jnp.maximum(q - p, 0)", "q"))
    message = r"'mine': whole outputs .* Policy\(.*: of 40,000 sequences .* continue \(1, 2\)"
    with pytest.raises(AssertionError, match=message):
        testing.check_method(decoding.Method("mine", trees.chain(1), TokenByToken(plan)))
    method = decoding.Method("mine", trees.chain(1), _Late(transport.get("maximal")))
    with pytest.raises(AssertionError, match="method 'mine': at temperature 0"):
        testing.check_greedy(method, 0)


def test_a_correct_method_passes_check_method(monkeypatch):
    monkeypatch.setattr(checks, "GENERATIONS", 20_000)
    testing.check_method(decoding.get_method("baseline"))


def _changed(result, **change):
    new = {name: of(getattr(result, name)) for name, of in change.items()}
    return dataclasses.replace(result, **new)


@pytest.mark.parametrize(
    ("check", "change", "message"),
    [
        (
            testing.check_outputs,
            {"lengths": lambda ends: ends + 1},
            "a sequence has 6 new tokens, and max_new_tokens is 5",
        ),
        (
            testing.check_rows,
            {"target_calls": lambda calls: calls + calls.max()},
            r"a sequence depends on its row .* target_calls is \d+ in row \d+ of",
        ),
        (
            testing.check_counters,
            {"lengths": lambda ends: ends - 1},
            "emitted_per_call does not add up to the new tokens",
        ),
        (
            testing.check_counters,
            {"target_calls": lambda calls: calls * 2},
            "emitted_per_call does not add up to target_ca",
        ),
        (testing.check_counters, {"tokens": lambda tokens: tokens | 1}, "tokens follow the end"),
        (testing.check_counters, {"tokens": lambda tokens: tokens * 0}, "the prompt has changed"),
        (
            testing.check_counters,
            {"emitted_per_call": lambda n: n + np.array([1, 0]), "target_calls": lambda n: n + 1},
            r"a call emits no token \(4000 of 4000 sequences\): sequence \[",
        ),
    ],
    ids=[
        "a sequence is too long",
        "target_calls depends on the row",
        "lengths are too small",
        "target_calls is doubled",
        "tokens follow the end",
        "the prompt changes",
        "a call emits no token",
    ],
)
def test_checks_of_outputs_rows_and_counters_report_each_error(monkeypatch, check, change, message):
    decode = checks._decode
    monkeypatch.setattr(
        checks, "_decode", lambda *args, **options: _changed(decode(*args, **options), **change)
    )
    with pytest.raises(AssertionError, match=f"method 'baseline': {message}"):
        check(decoding.get_method("baseline"))


@pytest.mark.parametrize("generations", [0, 1_000, 6_000])
def test_check_outputs_refuses_fewer_sequences_than_a_batch(generations):
    with pytest.raises(UserError, match=f"generations={generations}: must be a positive multiple"):
        testing.check_outputs(decoding.get_method("baseline"), generations=generations)


def test_classes_whose_equality_ignores_their_options_are_refused():
    class Lost(type(_lazy())):
        def __init__(self, half):
            super().__init__(w=half / 2)

    class Kept(Lost):
        __eq__, __hash__ = object.__eq__, object.__hash__

    class Late(TokenByToken):
        offset: int = 1

    class Changed(transport.rules.IndependentDrafts):
        seed: int = 0

    class OfRule(type(transport.get("naive"))):
        rule = Changed()

    message = "class {}: adds {}, which its equality ignores; decorate it with @dataclasses.data"
    naive = transport.get("naive")
    transport.register("lost", Lost)
    for make, kind, adds in (
        (lambda: transport.get("lost", half=1), "Lost", "__init__"),
        (lambda: testing.check_plan(Lost(1)), "Lost", "__init__"),
        (lambda: decoding.Method("", trees.none(), TokenByToken(Lost(1))), "Lost", "__init__"),
        (lambda: decoding.Method("", trees.none(), Late(naive)), "Late", "offset"),
        (lambda: decoding.Method("", trees.none(), TokenByToken(OfRule())), "Changed", "seed"),
    ):
        with pytest.raises(UserError, match=message.format(kind, adds)):
            make()
    registry.check_equality(Kept(1))


def test_check_compilations_reports_a_method_that_recompiles():
    class Unequal(TokenByToken):
        __eq__, __hash__ = object.__eq__, object.__hash__

    def build():
        return decoding.Method("mine", trees.none(), Unequal(transport.get("maximal")))

    with pytest.raises(AssertionError, match=r"method 'mine': the second call compiled \d+ "):
        testing.check_compilations(build(), build())


def test_a_registered_method_accepts_only_its_own_options():
    _lazy()

    def factory(*, draft_length=4, w=0.5):
        verifier = TokenByToken(transport.get("lazy", w=w))
        return decoding.Method("lazy", trees.chain(draft_length), verifier)

    decoding.register("lazy", factory)
    assert decoding.get_method("lazy", w=0.25).verifier.plan == transport.get("lazy", w=0.25)
    with pytest.raises(
        UserError, match="method 'lazy' has no option 'gamma'; it has draft_length, w"
    ):
        decoding.get_method("lazy", gamma=1.0)
    with pytest.raises(UserError, match="plan 'lazy' has no option 'gamma'; it has w"):
        transport.get("lazy", gamma=1.0)


class _NoPMF(transport.Plan):
    def choose(self, key, p, q, drafts, valid):
        return drafts[0]

    def exact_acceptance(self, p, q, k):
        return 1.0


@pytest.mark.parametrize(
    ("name", "plan", "message"),
    [
        ("kseq", _NoPMF, "name='kseq': "),
        ("mine", _NoPMF, "plan 'mine': .*'exact_pmf'"),
        ("mine", types, "plan 'mine': <module 'types'.*: must be a class that inherits from Plan"),
        ("mine", dict, "plan 'mine': <class 'dict'>: must be a class that inherits from Plan"),
    ],
)
def test_taken_names_and_things_that_are_no_plan_are_refused(name, plan, message):
    with pytest.raises(UserError, match=message):
        transport.register(name, plan)
    assert "mine" not in transport.PLANS


def test_a_function_of_options_can_be_registered_as_a_plan():
    transport.register("mine", lambda *, half=True: transport.get("kseq", gamma=1 + half))
    mine = transport.get("mine", half=False)
    assert mine == transport.get("kseq", gamma=1) and mine.name == "mine"
    with pytest.raises(UserError, match="plan 'mine' has no option 'gamma'; it has half"):
        transport.get("mine", gamma=1)
    transport.register("wrong", lambda: "kseq")
    with pytest.raises(UserError, match="plan 'wrong': its factory returns 'kseq'; return a Plan"):
        transport.get("wrong")


def test_methods_with_taken_names_or_wrong_factories_are_refused():
    with pytest.raises(UserError, match="name='otm'"):
        decoding.register("otm", decoding.METHODS["otm"])
    with pytest.raises(UserError, match=r"factory=Method\("):
        decoding.register("mine", decoding.get_method("baseline"))
