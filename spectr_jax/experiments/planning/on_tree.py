"""Which trees a method can draft, and with which options."""

import inspect
from typing import Any

from spectr_jax.decoding import Method, get_method, methods
from spectr_jax.decoding import tree as trees
from spectr_jax.decoding.tree import Tree
from spectr_jax.decoding.verifiers import Verifier
from spectr_jax.utils.errors import UserError


def options_for(name: str, tree: Tree) -> dict[str, Any] | None:
    """Returns the options with which the method `name` drafts `tree`, or None if it cannot.

    The options of its factory decide. With `tree` it drafts any tree that its verifier accepts,
    with `num_drafts` and `draft_length` K chains of L tokens, with `draft_length` alone one chain,
    and without these only its default tree.

    Raises:
      UserError: an unknown method.
    """
    default, names = get_method(name), _option_names(name)
    if not _accepts(default.verifier, tree):
        return None
    shape: dict[str, Any] = {}
    if tree.size:
        chains = {"num_drafts": len(tree.levels[1]), "draft_length": tree.height}
        shape = {"tree": tree} if "tree" in names else chains
    options = {option: value for option, value in shape.items() if option in names}
    return options if get_method(name, **options).tree == tree else None


def on_tree(name: str, tree: Tree) -> Method | None:
    """Returns the method `name` on `tree`, or None if it cannot draft it; see `options_for`."""
    options = options_for(name, tree)
    return None if options is None else get_method(name, **options)


def method_of(spec: str, field: str = "methods") -> Method:
    """Returns the method of a spec `NAME TREE` or `NAME`, such as `lookup chain:4`.

    Args:
      spec: the name of a method, and a tree as in `tree.parse`.
      field: the config field that has the spec, for errors.

    Raises:
      UserError: the method or tree does not exist, they do not go together, or nothing is drafted.
    """
    name, _, shape = spec.partition(" ")
    method = on_tree(name, trees.parse(shape)) if shape else get_method(name)
    if method is None:
        raise UserError(
            f"{field}={spec!r}: {name!r} does not draft the tree {shape!r}; give another one"
        )
    if not method.tree.size:
        raise UserError(
            f"{field}={spec!r}: drafts nothing, and the baseline is measured anyway; leave it out"
        )
    return method


def cannot_branch(name: str) -> bool:
    """Returns whether the method `name` cannot draft trees that branch; see `options_for`."""
    return options_for(name, trees.batch(2)) is None


def _option_names(name: str) -> set[str]:
    """Returns the options of a method.

    A factory that takes `**options` has a parameter `method` for the method that they belong to.
    """
    parameters = inspect.signature(methods.METHODS[name]).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    inner = parameters.get("method") if passes_on else None
    return set(parameters) | (_option_names(inner.default) if inner else set())


def _accepts(verifier: Verifier, tree: Tree) -> bool:
    try:
        verifier.check(tree)
    except UserError:
        return False
    return True
