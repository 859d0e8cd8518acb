"""The arrays of a model by name."""

from typing import Any

import jax


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {path: leaf} of a pytree, with paths such as `blocks/0/qkv/kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def with_leaves(like: Any, leaves: dict[str, Any]) -> Any:
    """Returns the inverse of `named_leaves`, for a tree of the structure of `like`."""
    return jax.tree.unflatten(
        jax.tree.structure(like), [leaves[path] for path in named_leaves(like)]
    )
