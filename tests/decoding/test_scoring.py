"""One pass over a packed tree equals separate forward passes on its paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import tree
from spectr_jax.decoding.loop import score
from spectr_jax.models.cache import Cache
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.transformer import Transformer, TransformerConfig

SHAPE = TransformerConfig(layers=2, width=32, mlp=64, heads=4, vocab_size=29, context=32)
pytestmark = pytest.mark.xdist_group("scoring")  # The tests share the program of `full`.


@pytest.fixture(scope="module")
def model():
    return Transformer(SHAPE, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def full(model):
    """Returns a function from tokens [12] to their logits [12, V]."""
    place = np.arange(12)[None], causal(np.zeros((1, 12)))
    forward = jax.jit(lambda tokens: model.extend(tokens[None], *place)[0][0])
    return lambda tokens: np.asarray(forward(tokens))


@pytest.mark.parametrize("spec", ["4,2,1", "specinfer:11", "batch:5", "chain:4"])
def test_logits_of_a_packed_tree_equal_separate_forward_passes(model, full, spec):
    shape = tree.parse(spec)
    rng = np.random.default_rng(0)
    lengths = np.array([1, 3, 6])
    sequences, drafts = rng.integers(0, 29, (3, 6)), rng.integers(0, 29, (3, shape.size))
    root = sequences[np.arange(3), lengths - 1]
    positions = np.broadcast_to(np.arange(6), (3, 6))

    @jax.jit
    def packed():
        cache = model.init_cache(3, 7 + shape.size)
        _, cache = model.extend(sequences, positions, causal(np.zeros((3, 6))), cache)
        tokens = jnp.asarray(np.concatenate([root[:, None], drafts], axis=1))
        lengths_B = jnp.asarray(lengths)
        return score(model, shape, tokens, lengths_B, Cache(cache.rows, lengths_B - 1))[0]

    logits = np.asarray(packed())
    for row in range(3):
        for node in range(shape.size + 1):
            path = drafts[row, np.flatnonzero(shape.ancestors[node])[1:] - 1]
            end = lengths[row] + len(path)
            spelled = np.zeros(12, np.int32)
            spelled[:end] = [*sequences[row, : lengths[row]], *path]
            np.testing.assert_allclose(logits[row, node], full(spelled)[end - 1], atol=1e-5)
