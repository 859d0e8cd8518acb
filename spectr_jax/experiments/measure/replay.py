"""What other methods would have emitted: their walks, run on parts of the trees that one method drafts.

The first of the i.i.d. drafts below a node are i.i.d. drafts, and so without replacement: a part of a drafted tree is a
drafted tree. One run with an observer so compares many trees and all walks whose drafts follow one rule, on the same calls
and drafts, whatever the acceptance depends on.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding import Call, Method
from spectr_jax.decoding.policy import ends
from spectr_jax.decoding.tree import Tree
from spectr_jax.experiments.planning.tree_search import tree_of
from spectr_jax.utils.errors import UserError


def covering(trees: Iterable[Tree]) -> Tree:
    """Returns the smallest tree of which each of `trees` is a part, by child indices."""
    return tree_of(list({tree.path(node) for tree in trees for node in range(1, tree.size + 1)}))


def part_of(whole: Tree, part: Tree) -> np.ndarray:
    """Returns [N + 1] the node of `whole` that each node of `part` is.

    Raises:
      UserError: it is no part.
    """
    places = {whole.path(node): node for node in range(whole.size + 1)}
    paths = [part.path(node) for node in range(part.size + 1)]
    lacking = next((path for path in paths if path not in places), None)
    if lacking is not None:
        raise UserError(
            f"the drafted tree has no node {lacking}, by child indices; draft the `covering` tree"
        )
    return np.array([places[path] for path in paths], np.int32)


def can_be_replayed(method: Method) -> bool:
    """Returns whether parts of its drafted trees are drafted trees: of a draft model, i.i.d. or without replacement."""
    return method.needs_draft and method.verifier.rule in ("iid", "without_replacement")


@functools.cache
def observe_replays(methods: tuple[Method, ...]) -> Callable[[Call], dict[str, jax.Array]]:
    """Returns an `observe` for `generate` with a method that drafts by the same rule on a `covering` tree.

    The same object for the same methods, so that nothing is compiled anew.

    Returns:
      A function that returns `emitted`, [methods] int32: the tokens that each would have emitted in the call, up to EOS; and
      `calls`, 1.

    Raises:
      UserError: a method whose drafts are not drawn so that the first of them are drafts.
    """
    for method in methods:
        if not can_be_replayed(method) or method.verifier.rule != methods[0].verifier.rule:
            raise UserError(
                f"method {method.name!r} drafts by the rule {method.verifier.rule!r}; replay methods that draft, all "
                "with i.i.d. drafts or all without replacement"
            )

    def emitted(call: Call, method: Method, key: jax.Array) -> jax.Array:
        scored = call.scored.part(method.tree, part_of(call.scored.tree, method.tree))
        chosen = method.verifier(key, scored)
        is_eos = ends(chosen.tokens, scored.policy) & (
            jnp.arange(len(chosen.tokens)) < chosen.emitted
        )
        return jnp.where(jnp.any(is_eos), jnp.argmax(is_eos) + 1, chosen.emitted).astype(jnp.int32)

    def observe(call: Call) -> dict[str, jax.Array]:
        keys = jax.random.split(call.key, len(methods))
        each = [emitted(call, method, keys[index]) for index, method in enumerate(methods)]
        return {"emitted": jnp.stack(each), "calls": jnp.int32(1)}

    return observe
