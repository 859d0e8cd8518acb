import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from spectr_jax.errors import UserError
from spectr_jax.files import digest
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.models.weights import load_weights, save_weights

SHAPE = TransformerConfig(layers=2, width=16, mlp=32, heads=2, vocab_size=11, context=16, dropout=0.1)


@pytest.fixture
def path(tmp_path):
    save_weights(tmp_path / "model.safetensors", Transformer(SHAPE, rngs=nnx.Rngs(0)), b"pieces", {"tokens": 7})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_in_bfloat16(path, dtype):
    model, tokenizer_digest = load_weights(path, dtype)
    assert tokenizer_digest == digest(b"pieces") and model.config.dropout == 0 and model.config.dtype == dtype
    wanted = nnx.state(Transformer(SHAPE, rngs=nnx.Rngs(0)))
    for ours, theirs in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_array_equal(ours.astype("float32"), theirs.astype("bfloat16").astype("float32"))


def test_missing(tmp_path):
    with pytest.raises(UserError, match="is not a model file that can be read"):
        load_weights(tmp_path / "none.safetensors")


@pytest.mark.parametrize("kept", [0, 5, 200, -10])
def test_truncated(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="is not a model file that can be read"):
        load_weights(path)


def test_foreign(path):
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    with pytest.raises(UserError, match="is a safetensors file of another program"):
        load_weights(path)


def test_parameters_of_another_shape(path):
    with safetensors.safe_open(path, framework="flax") as file:
        metadata = file.metadata()
    safetensors.numpy.save_file({"x": np.zeros(3)}, path, metadata)
    with pytest.raises(UserError, match="do not fit its own model shape"):
        load_weights(path)
