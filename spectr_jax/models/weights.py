"""A model in one file or a few: safetensors with the shape of the model, and what it was trained
on, in the metadata."""

import dataclasses
import glob
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
from flax import nnx

from spectr_jax.models import llama, transformer
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import quantized
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.models.vocabulary import Kept
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import check_fetched, digest

FORMAT = "spectr_jax/1"
LLAMA = "llama"
STORED = ("bfloat16", "int8")
SUFFIX = ".safetensors"
SCALE = ":scale"
EXPORT = "export_sha256"
"""Metadata key that the parts of one export share, so that a part of another is noticed; older
files lack it."""


def save_weights(
    path: pathlib.Path,
    model: Transformer | Llama,
    tokenizer_proto: bytes | str,
    notes: dict[str, Any],
    dtype: str = "bfloat16",
    part_bytes: int | None = None,
) -> list[pathlib.Path]:
    """Writes the parameters, each file whole or not at all.

    Args:
      path: of the model, without the suffix; its tokenizer belongs in the same folder, as
        `tokenizer.model`.
      model: what to write.
      tokenizer_proto: of the tokenizer, whose digest goes with the weights; of a student, the
        digest of its teacher's vocabulary.
      notes: JSON values on the training.
      dtype: "bfloat16", or "int8": matrices as int8 with a float32 scale for each output (for each
        token, of the embedding).
      part_bytes: the most bytes of a file; None for one file, whatever its size.

    Returns:
      The files: PATH.safetensors, or PATH-00001-of-00003.safetensors and so on.

    Raises:
      UserError: an array does not fit a file of `part_bytes`, or the dtype is not one of these.
    """
    if dtype not in STORED:
        raise unknown("stored dtype", dtype, STORED)
    metadata = {
        "format": FORMAT,
        **({"family": LLAMA} if isinstance(model, Llama) else {}),
        "model": json.dumps(dataclasses.asdict(model.config)),
        "tokenizer_sha256": tokenizer_proto
        if isinstance(tokenizer_proto, str)
        else digest(tokenizer_proto),
        "notes": json.dumps(notes),
    }
    arrays: dict[str, jax.Array] = {}
    for name, leaf in named_leaves(nnx.state(model, (nnx.Param, Kept))).items():
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            arrays[name] = jnp.asarray(leaf)
        elif dtype == "int8" and leaf.ndim == 2:
            arrays[name], arrays[name + SCALE] = _quantized(name, jnp.asarray(leaf, jnp.float32))
        else:
            arrays[name] = jnp.asarray(leaf, jnp.bfloat16)
    metadata[EXPORT] = _export_digest(arrays, metadata, part_bytes)
    parts = _parts(arrays, metadata, part_bytes)
    numbers = [f"-{number:05d}-of-{len(parts):05d}" for number in range(1, len(parts) + 1)]
    files = [path.with_name(path.name + number * (len(parts) > 1) + SUFFIX) for number in numbers]
    for file, part in zip(files, parts, strict=True):
        write_tensors(file, part, metadata)
    for old in {_whole(path), *_found_parts(path)} - set(files):
        old.unlink(missing_ok=True)
    return files


def write_tensors(path: pathlib.Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """Writes a safetensors file, whole or not at all.

    Raises:
      UserError: the disk is full.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        safetensors.flax.save_file(tensors, partial, metadata)
        partial.chmod(0o644)  # The library leaves it to the owner alone.
        partial.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        partial.unlink(missing_ok=True)  # It may be what fills the disk.
        raise UserError(
            f"{str(path)!r} cannot be written ({error}); make room, or choose another folder"
        ) from error


def weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a model: `path` itself, PATH.safetensors, or its parts in order; none if
    there is no such model."""
    if not path.name:  # The root of the file system.
        return []
    whole = _whole(path)
    return [whole] if whole.is_file() else _found_parts(path)


def load_weights(path: pathlib.Path, dtype: str = "float32") -> tuple[Transformer | Llama, str]:
    """Reads a model for decoding: parameters and activations in `dtype`, no dropout.

    Args:
      path: of the model, with or without the suffix of its one file.
      dtype: "float32" or "bfloat16", whatever the files hold.

    Returns:
      The model and the digest of its tokenizer, of a Llama that of its vocabulary.

    Raises:
      UserError: a file is missing, truncated, not ours, or of another export than the others.
    """
    arrays: dict[str, jax.Array] = {}
    metadata: dict[str, str] = {}
    exports: dict[str | None, pathlib.Path] = {}
    try:
        for file in _all_files(path):
            check_fetched(file)
            with safetensors.safe_open(file, framework="flax") as part:
                metadata = part.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(
                    f"{str(file)!r} is a safetensors file of another program; give one that "
                    "spectr_jax wrote"
                )
            exports.setdefault(metadata.get(EXPORT), file)
            if len(exports) > 1:
                first, second = (file.name for file in exports.values())
                raise UserError(
                    f"{str(path)!r} has parts of two exports, such as {first!r} and {second!r}; "
                    "export it again, or fetch "
                    "all of its parts again"
                )
            arrays.update(safetensors.flax.load_file(file))
        config = _config(metadata, dtype)
    except (OSError, safetensors.SafetensorError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r} is not a model file that can be read ({error}); fetch or export it "
            "again"
        ) from error
    scales = {
        name.removesuffix(SCALE): arrays.pop(name) for name in list(arrays) if name.endswith(SCALE)
    }
    for name, scale in scales.items():
        arrays[name] = arrays[name].astype(jnp.float32) * scale
    return from_arrays(config, arrays, str(path)), metadata["tokenizer_sha256"]


def _config(metadata: dict[str, str], dtype: str) -> TransformerConfig | LlamaConfig:
    fields = json.loads(metadata["model"])
    if metadata.get("family") == LLAMA:
        return LlamaConfig(**{**fields, "dtype": dtype})
    return TransformerConfig(**{**fields, "dtype": dtype, "dropout": 0.0})


def from_arrays(
    config: TransformerConfig | LlamaConfig, arrays: dict[str, jax.Array], source: str
) -> Any:
    """Returns a decoder with parameters `arrays` {path: array}; `source` is named if they do not
    fit `config`."""
    graphdef, state = (
        llama.abstract(config) if isinstance(config, LlamaConfig) else transformer.abstract(config)
    )
    shapes = {name: array.shape for name, array in arrays.items()}
    if shapes != {name: leaf.shape for name, leaf in named_leaves(state).items()}:
        raise UserError(
            f"the parameters in {source!r} do not fit its own model shape {config}; fetch or "
            "export it again"
        )
    integers = {
        name
        for name, leaf in named_leaves(state).items()
        if jnp.issubdtype(leaf.dtype, jnp.integer)
    }
    typed = {
        name: array if name in integers else jnp.asarray(array, config.dtype)
        for name, array in arrays.items()
    }
    return nnx.merge(graphdef, with_leaves(state, typed))


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {path: leaf} of a pytree, with paths such as `blocks/0/qkv/kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def with_leaves(like: Any, leaves: dict[str, Any]) -> Any:
    """Returns the inverse of `named_leaves`, for a tree of the structure of `like`."""
    return jax.tree.unflatten(
        jax.tree.structure(like), [leaves[path] for path in named_leaves(like)]
    )


def _quantized(name: str, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 and float32 scales of a kernel [inputs, outputs] by output, of an embedding [tokens,
    width] by token."""
    if "embedding" in name or name.startswith("positions"):
        return quantized(matrix)
    whole, scale = quantized(matrix.T)
    return whole.T, scale.T


def _export_digest(
    arrays: dict[str, jax.Array], metadata: dict[str, str], part_bytes: int | None
) -> str:
    contents = {name: digest(np.asarray(array).tobytes()) for name, array in arrays.items()}
    return digest(json.dumps([metadata, part_bytes, contents]).encode())


def _parts(
    arrays: dict[str, jax.Array], metadata: dict[str, str], part_bytes: int | None
) -> list[dict[str, jax.Array]]:
    """Returns the arrays in order, as many to a file as fit."""
    # The length of the header comes first, then blanks up to a multiple of 8.
    empty = 8 + len(json.dumps({"__metadata__": metadata})) + 8
    parts: list[dict[str, jax.Array]] = [{}]
    size = empty
    for name, array in arrays.items():
        # At most: offsets are of fewer digits, and the file has no blanks between the fields.
        entry = {name: {"dtype": "BF16", "shape": array.shape, "data_offsets": [10**12, 10**12]}}
        needed = len(json.dumps(entry)) + array.nbytes
        if part_bytes and empty + needed > part_bytes:
            raise UserError(
                f"{name!r} needs a file of {empty + needed} bytes, more than "
                f"part_bytes={part_bytes}; allow larger parts "
                "(of export: --part_mb)"
            )
        if part_bytes and size + needed > part_bytes:
            parts.append({})
            size = empty
        parts[-1][name] = array
        size += needed
    return parts


def _whole(path: pathlib.Path) -> pathlib.Path:
    return path if path.suffix == SUFFIX else path.with_name(path.name + SUFFIX)


def _found_parts(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.parent.glob(f"{glob.escape(path.name)}-?????-of-?????{SUFFIX}"))


def _all_files(path: pathlib.Path) -> list[pathlib.Path]:
    files = weight_files(path)
    if not files:
        raise FileNotFoundError(f"no {path.name}{SUFFIX} and no parts of it")
    wanted = 1 if files == [_whole(path)] else int(files[0].stem[-5:])
    if len(files) != wanted:
        raise FileNotFoundError(f"{len(files)} of {wanted} parts are there")
    return files
