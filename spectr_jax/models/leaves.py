"""The arrays of a model by name."""

from typing import Any

import jax


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {path: leaf} of a pytree, with paths such as `blocks/0/qkv/kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def dtype_in(name: str, dtype: str) -> str:
    """Returns the dtype of an array of floats, by name, of a decoder that is read in `dtype`.

    Scales of norms stay float32: those of Gemma are 1 + w with a small w, of which bfloat16 would
    lose most bits.
    """
    return "float32" if name.endswith("scale/value") else dtype


def cast(tree: Any, dtype: str) -> Any:
    """Returns a tree of float arrays in their `dtype_in` a decoder."""
    leaves = named_leaves(tree)
    return with_leaves(tree, {name: x.astype(dtype_in(name, dtype)) for name, x in leaves.items()})


def with_leaves(like: Any, leaves: dict[str, Any]) -> Any:
    """Returns the inverse of `named_leaves`, for a tree of the structure of `like`."""
    return jax.tree.unflatten(
        jax.tree.structure(like), [leaves[path] for path in named_leaves(like)]
    )
