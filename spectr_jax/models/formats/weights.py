"""Our model files: safetensors, with the model's shape and notes on its training as metadata."""

import dataclasses
import glob
import json
import os
import pathlib
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.flax
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.models.bigram import Bigram, BigramConfig
from spectr_jax.models.formats.parts import fill
from spectr_jax.models.formats.tensors import Unread, locations_of, unread
from spectr_jax.models.leaves import dtype_in, named_leaves
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import Int8Linear, quantized
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.models.vocabulary import Constant
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import digest, parse_json

FORMAT = "spectr_jax/1"
STORED = ("bfloat16", "int8")
SUFFIX = ".safetensors"
SCALE = ":scale"
EXPORT = "export_sha256"
"""Metadata key whose value all parts of one export share. Older files lack it."""

AnyStored: TypeAlias = Transformer | Llama | Bigram
FAMILIES: dict[str | None, tuple[type, type]] = {
    None: (Transformer, TransformerConfig),
    "llama": (Llama, LlamaConfig),
    "bigram": (Bigram, BigramConfig),
}
"""The class and the class of its config, of each value of `family`."""


def save_weights(
    path: pathlib.Path,
    model: AnyStored,
    tokenizer_proto: bytes | str,
    notes: dict[str, Any],
    dtype: str = "bfloat16",
    part_bytes: int | None = None,
) -> list[pathlib.Path]:
    """Writes the parameters; each file is written atomically.

    Args:
      path: path of the model without suffix; its `tokenizer.model` belongs in the same folder.
      model: the model.
      tokenizer_proto: content of its tokenizer, whose digest is stored; for a student the digest of
        its teacher's vocabulary.
      notes: JSON values on the training.
      dtype: "bfloat16", or "int8": matrices as int8 with a float32 scale for each output (for each
        token of an embedding).
      part_bytes: largest size of the arrays in a file, if it has more than one array; None for one
        file of any size.

    Returns:
      The files: PATH.safetensors, or PATH-00001-of-00003.safetensors and so on.

    Raises:
      UserError: the dtype is unknown, or the model is split over a mesh.
    """
    if dtype not in STORED:
        raise unknown("stored dtype", dtype, STORED)
    proto = tokenizer_proto
    family = _family_of(model)
    fields = dataclasses.asdict(model.config)
    if (shards := fields.pop("shards", 1)) > 1:
        raise UserError(f"shards={shards}: the model is split over a mesh; load it without a mesh")
    metadata = {
        "format": FORMAT,
        **({"family": family} if family else {}),
        "model": json.dumps(fields),
        "tokenizer_sha256": proto if isinstance(proto, str) else digest(proto),
        "notes": json.dumps(notes),
    }
    arrays: dict[str, jax.Array] = {}
    for name, leaf in named_leaves(nnx.state(model, (nnx.Param, Constant))).items():
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            arrays[name] = jnp.asarray(leaf)
        elif dtype == "int8" and leaf.ndim == 2:
            arrays[name], arrays[name + SCALE] = _quantized(name, jnp.asarray(leaf, jnp.float32))
        else:
            arrays[name] = jnp.asarray(leaf, dtype_in(name, "bfloat16"))
    digests = {name: digest(np.asarray(array).tobytes()) for name, array in arrays.items()}
    metadata[EXPORT] = digest(json.dumps([metadata, part_bytes, digests]).encode())
    parts = _parts(arrays, part_bytes)
    numbers = [f"-{number:05d}-of-{len(parts):05d}" for number in range(1, len(parts) + 1)]
    files = [path.with_name(path.name + number * (len(parts) > 1) + SUFFIX) for number in numbers]
    for file, part in zip(files, parts, strict=True):
        write_tensors(file, part, metadata)
    for old in {_whole(path), *_found_parts(path)} - set(files):
        old.unlink(missing_ok=True)
    return files


def _family_of(model: AnyStored) -> str | None:
    """Returns the key of a model in `FAMILIES`; raises `UserError` if it cannot be stored."""
    families = [name for name, (kind, *_) in FAMILIES.items() if type(model) is kind]
    if not families:
        raise UserError(
            f"a model of type {type(model).__name__}: is not stored; keep its own files"
        )
    if any(isinstance(module, Int8Linear) for _, module in nnx.iter_modules(model)):
        raise UserError("an int8 model is not stored; give the original model, and dtype='int8'")
    return families[0]


def write_tensors(path: pathlib.Path, tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    """Writes a safetensors file atomically; raises `UserError` if it cannot be written."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        safetensors.flax.save_file(tensors, partial, metadata)
        partial.chmod(0o644)  # The library lets only the owner read it.
        partial.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise UserError(
            f"{str(path)!r} cannot be written ({error}); make room, or choose another folder"
        ) from error


def weight_files(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns a model's files: `path` itself, PATH.safetensors, or parts in order; [] if none."""
    if not path.name:  # The root of the file system.
        return []
    whole = _whole(path)
    return [whole] if whole.is_file() else _found_parts(path)


def read_notes(path: pathlib.Path) -> dict[str, Any]:
    """Returns the notes of a model's files, or {} if they are missing or damaged."""
    try:
        return parse_json(_read(path)[0]["notes"])
    except (OSError, safetensors.SafetensorError, ValueError, KeyError):
        return {}


def load_weights(
    path: pathlib.Path, dtype: str = "float32", mesh: Mesh | None = None
) -> tuple[AnyStored, str]:
    """Reads a model for decoding, without dropout.

    Args:
      path: path of the model, with or without the suffix of its one file.
      dtype: "float32", "bfloat16" or "int8", as in `parts.fill`, whatever the files hold.
      mesh: as in `parts.fill`. A `Bigram` is read onto one device, and is never in int8.

    Returns:
      The model, and the digest of its tokenizer (of a student: of its vocabulary).

    Raises:
      UserError: a file is missing, truncated, not ours, or from another export than the others, or
        a parameter is not finite; or as `parts.fill`.
    """
    try:
        metadata, stored = _read(path)
        family = metadata.get("family")
        if family not in FAMILIES:
            raise UserError(
                f"{str(path)!r} is of the family {family!r}, which this version does not know; "
                "install a newer one"
            )
        kind, config_kind = FAMILIES[family]
        fields: dict[str, Any] = {"dtype": "float32"} | (
            {"dropout": 0.0} if kind is Transformer else {}
        )
        config: Any = config_kind(**_checked_sizes(parse_json(metadata["model"])) | fields)
        tokenizer = metadata["tokenizer_sha256"]
    except UserError:
        raise
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(path)!r} is not a model file that can be read ({error}); fetch or export it "
            "again"
        ) from error
    arrays = (
        (name.removesuffix("/value"), _array(path, name, stored, config.vocab_size))
        for name in stored
        if not name.endswith(SCALE)
    )
    if kind is Bigram:
        dtype, mesh = "float32" if dtype == "int8" else dtype, None
    return fill(config, arrays, dtype, source=str(path), mesh=mesh), tokenizer


def _checked_sizes(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config; raises `ValueError` if a size is not a positive integer."""
    for name in (
        "layers",
        "width",
        "mlp",
        "heads",
        "kv_heads",
        "head_width",
        "vocab_size",
        "context",
    ):
        if name in fields and (type(fields[name]) is not int or fields[name] < 1):
            raise ValueError(f"{name}={fields[name]!r}: must be a positive integer")
    return fields


def _read(path: pathlib.Path) -> tuple[dict[str, str], dict[str, Unread]]:
    """Returns the metadata and the arrays of a model's files."""
    files = weight_files(path)
    if not files:
        raise FileNotFoundError(f"no {path.name}{SUFFIX} and no parts of it")
    wanted = 1 if files == [_whole(path)] else int(files[0].stem[-5:])
    if len(files) != wanted:
        raise FileNotFoundError(f"{len(files)} of {wanted} parts are there")
    arrays: dict[str, Unread] = {}
    exports: dict[str | None, pathlib.Path] = {}
    for file in files:
        found = locations_of(file)
        with safetensors.safe_open(file, framework="numpy") as part:
            metadata = part.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise UserError(
                f"{str(file)!r} is a safetensors file of another program; give one of ours"
            )
        exports.setdefault(metadata.get(EXPORT), file)
        arrays |= {name: unread(place) for name, place in found.items()}
    if len(exports) > 1:
        first, second, *_ = (file.name for file in exports.values())
        raise UserError(
            f"{str(path)!r} has parts of two exports, such as {first!r} and {second!r}; export it "
            "again, or fetch all of its parts again"
        )
    return metadata, arrays


def _array(path: pathlib.Path, name: str, stored: dict[str, Unread], vocab_size: int) -> np.ndarray:
    """Returns an array of a model's files, dequantized, in Hugging Face's layout.

    NumPy dequantizes it, because XLA would compile programs for each shape.
    """
    array = stored[name][:]
    if name + SCALE in stored:
        with np.errstate(invalid="ignore"):  # `fill` refuses values that are not finite.
            array = array.astype(np.float32) * stored[name + SCALE][:]
    if array.dtype.kind in "iu" and not np.all((array >= 0) & (array < vocab_size)):
        outside = f"{name} has tokens outside 0..{vocab_size - 1}"
        raise UserError(f"{str(path)!r}: {outside}; fetch or export it again")
    return array.T if name.endswith("/kernel/value") else array


def _quantized(name: str, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns int8 and scales, by output of a kernel [inputs, outputs] or token of an embedding."""
    if "embedding" in name or name.startswith("positions"):
        return quantized(matrix)
    whole, scale = quantized(matrix.T)
    return whole.T, scale.T


def _parts(arrays: dict[str, jax.Array], part_bytes: int | None) -> list[dict[str, jax.Array]]:
    """Returns the arrays of each file, in order; each file takes as many as fit."""
    parts: list[dict[str, jax.Array]] = [{}]
    size = 0
    for name, array in arrays.items():
        size += array.nbytes
        if part_bytes and parts[-1] and size > part_bytes:
            parts.append({})
            size = array.nbytes
        parts[-1][name] = array
    return parts


def _whole(path: pathlib.Path) -> pathlib.Path:
    return path if path.suffix == SUFFIX else path.with_name(path.name + SUFFIX)


def _found_parts(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path.parent.glob(f"{glob.escape(path.name)}-?????-of-?????{SUFFIX}"))
