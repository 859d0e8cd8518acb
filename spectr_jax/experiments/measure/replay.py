"""Replays other methods on the trees that one method drafts: what would they have emitted?

The first k drafts below a node, i.i.d. or without replacement, are k drafts of the same rule. So
each part of a drafted tree is a drafted tree, and one observed run compares many trees, and all
verifiers with one drafting rule, on the same calls and drafts.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding import Call, Method
from spectr_jax.decoding.policy import ends
from spectr_jax.decoding.tree import Tree, tree_of
from spectr_jax.transport import rules


def covering(trees: Iterable[Tree]) -> Tree:
    """Returns the smallest tree that contains each of `trees`, node by node in child indices."""
    return tree_of(list({tree.path(node) for tree in trees for node in range(1, tree.size + 1)}))


def part_of(whole: Tree, part: Tree) -> np.ndarray:
    """Returns [N + 1]: for each node of `part`, the same node of `whole`, which contains `part`."""
    places = {whole.path(node): node for node in range(whole.size + 1)}
    return np.array([places[part.path(node)] for node in range(part.size + 1)], np.int32)


def can_be_replayed(method: Method) -> bool:
    """Returns whether parts of the method's drafted trees are drafted trees of the same rule."""
    return method.needs_draft and method.verifier.rule in (rules.IID, rules.WITHOUT_REPLACEMENT)


@functools.cache
def observe_replays(methods: tuple[Method, ...]) -> Callable[[Call], dict[str, jax.Array]]:
    """Returns an `observe` for `generate` with a method of the same drafting rule as `methods`, on
    their `covering` tree. The methods have one rule and satisfy `can_be_replayed`.

    The function is cached, so that `generate` does not recompile.

    Returns:
      A function that returns `emitted`, [methods] int32: the number of tokens that each method
      would have emitted in the call, up to EOS; and `calls`, 1.
    """

    def emitted(call: Call, method: Method, key: jax.Array) -> jax.Array:
        scored = call.scored.part(method.tree, part_of(call.scored.tree, method.tree))
        chosen = method.verifier(key, scored)
        is_emitted = jnp.arange(len(chosen.tokens)) < chosen.emitted
        is_eos = ends(chosen.tokens, call.eos) & is_emitted
        return jnp.where(jnp.any(is_eos), jnp.argmax(is_eos) + 1, chosen.emitted).astype(jnp.int32)

    def observe(call: Call) -> dict[str, jax.Array]:
        keys = jax.random.split(call.key, len(methods))
        each = [emitted(call, method, keys[index]) for index, method in enumerate(methods)]
        return {"emitted": jnp.stack(each), "calls": jnp.int32(1)}

    return observe
