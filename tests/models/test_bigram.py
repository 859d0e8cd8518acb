"""Tests the bigram model: its distributions, its file, and damaged files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax

from spectr_jax import check_model
from spectr_jax.loading.by_name import load
from spectr_jax.models.bigram import Bigram, BigramConfig
from spectr_jax.models.formats.weights import save_weights
from spectr_jax.models.vocabulary import Constant
from spectr_jax.utils.errors import UserError

V, RANKS = 11, 3


def bigram(vocab_size=V, ranks=RANKS):
    """Returns a model with distinct next tokens, and descending probabilities."""
    rng = np.random.default_rng(0)
    model = Bigram(BigramConfig(vocab_size, ranks, context=32))
    tokens = rng.permuted(np.tile(np.arange(vocab_size), (vocab_size, 1)), axis=1)[:, :ranks]
    model.tokens = Constant(jnp.asarray(tokens, model.tokens[...].dtype))
    probs = -np.sort(-rng.dirichlet(np.ones(ranks), vocab_size))
    model.log_probs[...] = jnp.asarray(np.log(probs), jnp.float32)
    return model


def test_a_bigram_model_follows_the_protocol():
    check_model(bigram())


def test_the_next_tokens_have_their_probabilities():
    model = bigram()
    logits, _ = model.extend(jnp.array([[4, 7]]), jnp.array([[0, 1]]), jnp.ones((1, 2, 2), bool))
    pmf = np.asarray(jax.nn.softmax(logits))[0]
    for row, token in zip(pmf, (4, 7), strict=True):
        probs = np.exp(np.asarray(model.log_probs[...])[token])
        np.testing.assert_allclose(row[np.asarray(model.tokens[...])[token]], probs, rtol=1e-6)
        assert np.count_nonzero(row) == RANKS


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_saved_model_loads_back(tmp_path, dtype):
    model = bigram()
    (file,) = save_weights(tmp_path / "table", model, "digest of a vocabulary", {"tokens": 7})
    loaded = load(str(file), dtype)
    assert loaded.tokenizer.vocabulary == "digest of a vocabulary"
    assert loaded.model.config == model.config and loaded.model.tokens[...].dtype == jnp.uint16
    np.testing.assert_array_equal(loaded.model.tokens[...], model.tokens[...])
    np.testing.assert_allclose(loaded.model.log_probs[...], model.log_probs[...], rtol=0.01)


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    (file,) = save_weights(tmp_path / "table", bigram(), "digest", {})
    arrays = safetensors.flax.load_file(file)
    with safetensors.safe_open(file, framework="flax") as opened:
        metadata = opened.metadata()
    name = next(name for name in arrays if name.startswith("tokens"))
    arrays[name] = arrays[name].at[2, 1].set(V)
    safetensors.flax.save_file(arrays, file, metadata)
    with pytest.raises(UserError, match=r"tokens/value has tokens outside 0\.\.10; fetch"):
        load(str(file))


@pytest.mark.parametrize("sizes", [(V, 0, 32), (V, V + 1, 32), (0, 1, 32), (V, RANKS, 0)], ids=str)
def test_shapes_out_of_range_are_refused(sizes):
    with pytest.raises(UserError, match="must be positive, with at most vocab_size ranks"):
        BigramConfig(*sizes)
