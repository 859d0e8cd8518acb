"""Times are measured for the given calls and interpolated between them; no speed is asserted."""

import functools

import pytest
from flax import nnx

from spectr_jax.decoding import get_method
from spectr_jax.experiments.measure.call_times import (
    PHASES,
    call_runs,
    call_seconds,
    phase_timers,
    timed,
    token_timer,
)
from spectr_jax.models.transformer import Transformer, TransformerConfig


@pytest.fixture(scope="module")
def model():
    return Transformer(TransformerConfig(1, 16, 32, 2, vocab_size=13, context=80), rngs=nnx.Rngs(0))


def test_call_seconds(model):
    seconds = call_seconds(model, 2, (1, 3, 9), context=8, repeats=3)
    assert all(seconds(count) > 0 for count in (1, 3, 9))
    assert seconds(2) == pytest.approx((seconds(1) + seconds(3)) / 2)
    assert seconds(5) == pytest.approx((2 * seconds(3) + seconds(9)) / 3)


def test_call_runs_reuses_the_donated_cache(model):
    run = call_runs(model, 2, 3, context=8)
    assert run() > 0 and run() > 0


@pytest.mark.slow
def test_phases(model):
    method = get_method("otm_block", tree="2,1")
    timers = functools.partial(phase_timers, method, model, model, context=8, repeats=2)
    everything = functools.partial(timers, batch=2)
    draft = functools.partial(timers, batch=1, phases=("draft",))
    seconds = timed("phases", {"everything": everything, "draft": draft})
    assert set(seconds["everything"]) == {*PHASES, "call"} and set(seconds["draft"]) == {"draft"}
    assert all(value > 0 for value in (*seconds["everything"].values(), *seconds["draft"].values()))


def test_all_timers_compile_before_one_measures():
    events = []

    def make(name: str):
        events.append(f"make {name}")
        return lambda: events.append(f"call {name}") or 1.0

    seconds = timed("both", {name: functools.partial(make, name) for name in "ab"})
    assert seconds == {"a": 1.0, "b": 1.0}
    assert sorted(events[:2]) == ["make a", "make b"] and events[2:] == ["call a", "call b"]


@pytest.mark.parametrize(
    ("name", "options"), [("block", {"draft_length": 2}), ("ersd", {"tree": "2,1"})]
)
def test_token_timer(name, options):
    assert token_timer(get_method(name, **options), 13, 2, repeats=2)() > 0
