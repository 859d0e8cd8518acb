"""Compares decoders with what transformers computed on the same weights (scripts/dev/references.py)."""

import json
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from spectr_jax import generate, get_method
from spectr_jax.decoding import Policy
from spectr_jax.models.cache import keep
from spectr_jax.models.formats import hf_llama
from spectr_jax.testing import check_model

ROOT = pathlib.Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "dev" / "references.py"))
NAMES = sorted(SCRIPT["MODELS"])


def written(name: str, folder: pathlib.Path, field: str = "config"):
    """Writes a model's folder, and returns its recorded outputs."""
    recorded = np.load(SCRIPT["FOLDER"] / f"{name}.npz")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(str(recorded[field]))
    shapes = json.loads(str(recorded["shapes"]))
    tensors = {each: SCRIPT["weight"](each, tuple(shape)) for each, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return recorded


def whole(model, tokens) -> np.ndarray:
    """Returns the logits [N, V] of one call on a sequence."""
    N = len(tokens)
    positions, visible = jnp.arange(N)[None], jnp.tri(N, dtype=bool)[None]
    return np.asarray(model.extend(jnp.asarray(tokens)[None], positions, visible)[0][0])


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, tmp_path):
    for field in ("config", "newer_config"):
        recorded = written(name, tmp_path / field, field)
        model = hf_llama.load_llama(tmp_path / field)
        ours = whole(model, SCRIPT["prompt"](model.vocab_size))
        np.testing.assert_allclose(ours, recorded["logits"], atol=1e-4, rtol=0)
