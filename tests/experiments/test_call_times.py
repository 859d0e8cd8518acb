"""Call times: measured where asked, interpolated between; no word about how long they are."""

import pytest
from flax import nnx

from spectr_jax.decoding import get_method
from spectr_jax.experiments.call_times import PHASES, call_runs, call_seconds, phase_seconds, token_seconds
from spectr_jax.models.transformer import Transformer, TransformerConfig


@pytest.fixture(scope="module")
def model():
    return Transformer(TransformerConfig(1, 16, 32, 2, vocab_size=13, context=80), rngs=nnx.Rngs(0))


def test_call_seconds(model):
    seconds = call_seconds(model, 2, (1, 3, 9), context=8, repeats=3)
    assert all(seconds(count) > 0 for count in (1, 3, 9))
    assert seconds(2) == pytest.approx((seconds(1) + seconds(3)) / 2)
    assert seconds(5) == pytest.approx((2 * seconds(3) + seconds(9)) / 3)


def test_call_runs_goes_on_with_the_cache_it_gave_away(model):
    run = call_runs(model, 2, 3, context=8)
    assert run() > 0 and run() > 0


def test_phases(model):
    method = get_method("otm_block", tree="2,1")
    seconds = phase_seconds(method, model, model, 2, context=8, repeats=2)
    assert set(seconds) == {*PHASES, "call"} and all(value > 0 for value in seconds.values())
    assert set(phase_seconds(method, model, model, 1, context=8, repeats=2, phases=("draft",))) == {"draft"}


@pytest.mark.parametrize(("name", "options"), [("block", {"draft_length": 2}), ("ersd", {"tree": "2,1"})])
def test_token_seconds(name, options):
    assert token_seconds(get_method(name, **options), 13, 2, repeats=2) > 0
