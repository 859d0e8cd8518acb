"""A model in one file: safetensors with the shape of the model, and what it was trained on, in the metadata."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import safetensors
import safetensors.flax
from flax import nnx

from spectr_jax.errors import UserError
from spectr_jax.files import digest
from spectr_jax.models.transformer import Transformer, TransformerConfig, abstract

FORMAT = "spectr_jax/1"


def save_weights(path: pathlib.Path, model: Transformer, tokenizer_proto: bytes, notes: dict[str, Any]) -> None:
    """Writes the parameters in bfloat16, atomically.

    Args:
      path: a .safetensors file; the tokenizer belongs beside it, as `tokenizer.model`.
      model: what to write.
      tokenizer_proto: of the tokenizer, whose digest goes with the weights.
      notes: JSON values on the training.
    """
    metadata = {
        "format": FORMAT,
        "model": json.dumps(dataclasses.asdict(model.config)),
        "tokenizer_sha256": digest(tokenizer_proto),
        "notes": json.dumps(notes),
    }
    arrays = {name: jnp.asarray(leaf, jnp.bfloat16) for name, leaf in named_leaves(nnx.state(model, nnx.Param)).items()}
    partial = path.with_name(path.name + ".partial")
    safetensors.flax.save_file(arrays, partial, metadata)
    partial.replace(path)


def load_weights(path: pathlib.Path, dtype: str = "float32") -> tuple[Transformer, str]:
    """Reads a model for decoding: parameters and activations in `dtype`, no dropout.

    Returns:
      The model and the digest of its tokenizer.

    Raises:
      UserError: the file is missing, truncated or not ours.
    """
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise UserError(f"{str(path)!r} is a safetensors file of another program; give one that spectr_jax wrote")
        config = TransformerConfig(**{**json.loads(metadata["model"]), "dtype": dtype, "dropout": 0.0})
        arrays = safetensors.flax.load_file(path)
    except (OSError, safetensors.SafetensorError, KeyError, TypeError) as error:
        raise UserError(f"{str(path)!r} is not a model file that can be read ({error}); fetch or export it again") from error
    return from_arrays(config, arrays, str(path)), metadata["tokenizer_sha256"]


def from_arrays(config: TransformerConfig, arrays: dict[str, jax.Array], source: str) -> Transformer:
    """A transformer with parameters `arrays` {path: array}; `source` is named if they do not fit `config`."""
    graphdef, state = abstract(config)
    shapes = {name: array.shape for name, array in arrays.items()}
    if shapes != {name: leaf.shape for name, leaf in named_leaves(state).items()}:
        raise UserError(f"the parameters in {source!r} do not fit its own model shape {config}; fetch or export it again")
    typed = {name: jnp.asarray(array, config.dtype) for name, array in arrays.items()}
    return nnx.merge(graphdef, with_leaves(state, typed))


def named_leaves(tree: Any) -> dict[str, Any]:
    """{path: leaf} of a pytree, with paths such as `blocks/0/qkv/kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def with_leaves(like: Any, leaves: dict[str, Any]) -> Any:
    """The inverse of `named_leaves`, for a tree of the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in named_leaves(like)])
