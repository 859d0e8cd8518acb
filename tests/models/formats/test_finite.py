"""Models whose weights are not finite are refused by every reader, with the name of the array.

`test_gguf.py` tests GGUF files.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from spectr_jax.loading.by_name import _restored
from spectr_jax.models.formats.checkpoint import Checkpoints
from spectr_jax.models.formats.gpt2 import load_gpt2
from spectr_jax.models.formats.hf_llama import load_llama, save_llama
from spectr_jax.models.formats.tensors import check_finite
from spectr_jax.models.formats.weights import load_weights, save_weights
from spectr_jax.utils.errors import UserError

PARTS = {
    "embed/embedding": lambda model: model.embed.embedding,
    "blocks/1/norm_mlp/scale": lambda model: model.blocks[1].norm_mlp.scale,
    "blocks/0/qkv/kernel": lambda model: model.blocks[0].qkv.kernel,
}


def _refused(name):
    return pytest.raises(UserError, match=rf"^'.*': {re.escape(name)} has values that are not fin")


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", jnp.bfloat16])
def test_infinities_and_nan_of_every_dtype_are_found(dtype):
    most = jnp.finfo(dtype).max
    for value in (np.inf, -np.inf, np.nan, -np.nan):
        with _refused("kernel"):
            check_finite("model", "kernel", np.array([[0, -1, value], [most, -most, 0]], dtype))
    check_finite("model", "kernel", np.array([[0, -0.0], [most, -most]], dtype))
    check_finite("model", "kernel", np.zeros((0, 3), dtype))
    check_finite("model", "tokens", np.array([2**31 - 1, -1]))


@pytest.mark.parametrize(
    ("name", "value"),
    [*zip(PARTS, (np.nan, -np.inf, np.inf), strict=True), ("embed/embedding", -np.inf)],
)
def test_folders_and_model_files_refuse_weights_that_are_not_finite(llamas, tmp_path, name, value):
    model = nnx.clone(llamas["tied"])
    part = PARTS[name](model)
    part[...] = part[...].at[(3,) * part[...].ndim].set(value)
    save_llama(tmp_path / "folder", model)
    for dtype in ("float32", "bfloat16", "int8"):
        with _refused(name):
            load_llama(tmp_path / "folder", dtype)
    for stored in ("bfloat16", "int8"):
        save_weights(tmp_path / stored, model, b"", {}, dtype=stored)
        with _refused(name):
            load_weights(tmp_path / stored)


def test_a_gpt2_with_weights_that_are_not_finite_is_refused(write_gpt2, tmp_path):
    path = write_gpt2(tmp_path / "gpt2") / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["transformer.h.1.mlp.c_fc.bias"][2] = np.nan
    safetensors.numpy.save_file(tensors, path)
    with _refused("blocks/1/up/bias"):
        load_gpt2(path.parent)


def test_a_checkpoint_with_parameters_that_are_not_finite_is_refused(llamas, tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    state = nnx.state(llamas["tied"], nnx.Param)
    monkeypatch.setattr(Checkpoints, "restore_params", lambda self, like, step: read)
    read = state
    assert _restored(tmp_path, state, False, "loss") is state
    read = jax.tree.map(lambda leaf: leaf / (leaf.ndim != 1), state)
    with _refused("blocks/0/norm_attention/scale"):
        _restored(tmp_path, state, False, "loss")
