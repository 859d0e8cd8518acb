"""Tests model files: round trips, int8, parts, and damaged files."""

import itertools
import json
import resource

import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
from flax import nnx

from spectr_jax.models.formats.weights import (
    EXPORT,
    load_weights,
    named_leaves,
    save_weights,
    weight_files,
)
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest

SHAPE = TransformerConfig(
    layers=2, width=16, mlp=32, heads=2, vocab_size=11, context=16, dropout=0.1
)


@pytest.fixture
def path(tmp_path):
    save_weights(tmp_path / "model", Transformer(SHAPE, rngs=nnx.Rngs(0)), b"pieces", {"tokens": 7})
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_weights_load_as_their_bfloat16_values(path, dtype):
    model, tokenizer_digest = load_weights(path, dtype)
    assert (
        tokenizer_digest == digest(b"pieces")
        and model.config.dropout == 0
        and model.config.dtype == dtype
    )
    wanted = named_leaves(nnx.state(Transformer(SHAPE, rngs=nnx.Rngs(0))))
    for name, ours in named_leaves(nnx.state(model)).items():
        theirs = wanted[name]
        assert ours.dtype == ("float32" if name.endswith("scale/value") else dtype)
        np.testing.assert_array_equal(
            ours.astype("float32"), theirs.astype("bfloat16").astype("float32")
        )


def test_a_full_disk_leaves_the_old_file_unchanged(path):
    """A limit of 3 kB per file acts as the full disk. No other file is left."""
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000, limits[1]))
        with pytest.raises(
            UserError,
            match=r"model.safetensors' cannot be written \(.*; make room, or choose another",
        ):
            save_weights(path.with_suffix(""), Transformer(SHAPE, rngs=nnx.Rngs(1)), b"pieces", {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in path.parent.iterdir()] == [
        path.name
    ] and path.read_bytes() == before


def test_missing_weight_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="is not a model file that can be read"):
        load_weights(tmp_path / "none.safetensors")


@pytest.mark.parametrize("kept", [0, 5, 200, -10])
def test_truncated_weight_files_are_refused(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match="is not a model file that can be read"):
        load_weights(path)


def test_safetensors_files_of_other_programs_are_refused(path):
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    with pytest.raises(UserError, match="is a safetensors file of another program"):
        load_weights(path)


def test_parameters_that_contradict_the_stored_shape_are_refused(path):
    with safetensors.safe_open(path, framework="flax") as file:
        metadata = file.metadata()
    tensors = safetensors.flax.load_file(path)
    safetensors.flax.save_file(tensors | {"x": np.zeros(3)}, path, metadata)
    with pytest.raises(UserError, match=r"x is \[3\] where its configuration gives none"):
        load_weights(path)
    del tensors["embed/embedding/value"]
    safetensors.flax.save_file(tensors, path, metadata)
    with pytest.raises(UserError, match="lacks embed/embedding/value, a part of its model"):
        load_weights(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "a"}, "vocab_size='a': must be a positive integer"),
        ({"vocab_size": 0}, "vocab_size=0: must be"),
        ({"layers": None}, "layers=None: must be"),
        ({"width": -64}, "width=-64: must be"),
        (None, "of the family 'mamba', which this version does not know; install a newer"),
    ],
)
def test_other_families_and_sizes_that_are_not_positive_are_refused(path, change, message):
    with safetensors.safe_open(path, framework="flax") as file:
        metadata = file.metadata()
    if change is None:
        metadata["family"] = "mamba"
    else:
        metadata["model"] = json.dumps(json.loads(metadata["model"]) | change)
    safetensors.flax.save_file(safetensors.flax.load_file(path), path, metadata)
    with pytest.raises(UserError, match=rf"model\.safetensors' is .*{message}"):
        load_weights(path)


def test_int8_weights_in_several_parts_load_back(tmp_path):
    """Weights are within half a step of their scale, and `quantize` restores the stored integers."""
    model = Transformer(SHAPE, rngs=nnx.Rngs(0))
    files = save_weights(tmp_path / "model", model, b"pieces", {}, dtype="int8", part_bytes=2_000)
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    stored = {
        name: array for file in files for name, array in safetensors.numpy.load_file(file).items()
    }
    loaded, tokenizer_digest = load_weights(tmp_path / "model")
    assert tokenizer_digest == digest(b"pieces")
    wanted, ours = named_leaves(nnx.state(model)), named_leaves(nnx.state(loaded))
    for name, leaf in wanted.items():
        if leaf.ndim == 1:
            stored_in = "float32" if name.endswith("scale/value") else "bfloat16"
            np.testing.assert_array_equal(ours[name], leaf.astype(stored_in).astype("float32"))
            continue
        assert stored[name].dtype == np.int8
        axis = 1 if name.startswith("embed/") else 0
        largest = np.max(np.abs(leaf), axis=axis, keepdims=True)
        assert np.all(np.abs(ours[name] - leaf) <= largest / 127 * 0.5001)
    with pytest.raises(UserError, match="an int8 model is not stored"):
        save_weights(tmp_path / "again", quantize(model), b"pieces", {}, dtype="int8")
    again = quantize(loaded)
    np.testing.assert_array_equal(
        again.blocks[0].up.kernel[...].T, stored["blocks/0/up/kernel/value"]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_arrays_of_a_file_fit_in_part_bytes(tmp_path, dtype):
    """An array that is larger has a file of its own."""
    model = Transformer(SHAPE, rngs=nnx.Rngs(0))
    for part_bytes in (10, 3_000, 4_001, 1_000_000):
        files = save_weights(tmp_path / "model", model, b"", {}, dtype, part_bytes=part_bytes)
        sizes = [
            [array.nbytes for array in safetensors.numpy.load_file(file).values()] for file in files
        ]
        assert all(sum(part) <= part_bytes or len(part) == 1 for part in sizes)
        assert all(sum(a) + sum(b) > part_bytes for a, b in itertools.pairwise(sizes))


def test_mixed_parts_of_two_exports_are_refused(tmp_path):
    """An export that is killed halfway leaves such parts. Parts without a digest, as older exports
    have, still load."""
    options = {"part_bytes": 3_000}
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        model = Transformer(SHAPE, rngs=nnx.Rngs(seed))
        files = save_weights(tmp_path / str(seed) / "model", model, b"pieces", {}, **options)
    (tmp_path / "1" / files[1].name).replace(tmp_path / "0" / files[1].name)
    with pytest.raises(
        UserError,
        match=r"parts of two exports, such as 'model-00001.*' and 'model-00002.*'; export it again",
    ):
        load_weights(tmp_path / "0" / "model")
    for file in (tmp_path / "0").iterdir():
        with safetensors.safe_open(file, framework="flax") as part:
            metadata = part.metadata()
        del metadata[EXPORT]
        safetensors.flax.save_file(safetensors.flax.load_file(file), file, metadata)
    load_weights(tmp_path / "0" / "model")


def test_an_export_replaces_older_parts(tmp_path):
    """Missing parts and an unknown dtype are refused."""
    model = Transformer(SHAPE, rngs=nnx.Rngs(0))
    first = save_weights(tmp_path / "model", model, b"pieces", {}, part_bytes=3_000)
    second = save_weights(tmp_path / "model", model, b"pieces", {}, part_bytes=4_000)
    assert weight_files(tmp_path / "model") == second and not any(file.exists() for file in first)
    second[1].unlink()
    with pytest.raises(UserError, match=rf"{len(second) - 1} of {len(second)} parts are there"):
        load_weights(tmp_path / "model")
    (whole,) = save_weights(tmp_path / "model", model, b"pieces", {})
    assert weight_files(tmp_path / "model") == [whole] == list(tmp_path.iterdir())
    with pytest.raises(UserError, match="'int4'"):
        save_weights(tmp_path / "model", model, b"pieces", {}, dtype="int4")
