"""Call times: measured where asked, interpolated between; no word about how long they are."""

import pytest
from flax import nnx

from spectr_jax.experiments.call_times import call_seconds
from spectr_jax.models.transformer import Transformer, TransformerConfig


def test_call_seconds():
    model = Transformer(TransformerConfig(1, 16, 32, 2, vocab_size=13, context=32), rngs=nnx.Rngs(0))
    seconds = call_seconds(model, 2, (1, 3, 9), context=8, repeats=3)
    assert all(seconds(count) > 0 for count in (1, 3, 9))
    assert seconds(2) == pytest.approx((seconds(1) + seconds(3)) / 2)
    assert seconds(5) == pytest.approx((2 * seconds(3) + seconds(9)) / 3)
