"""Verifiers at real vocabularies: the first two tokens of a call follow the target.

Plans sort small vocabularies and group the tokens of large ones by their ratios. The distributions here have what such cells
can get wrong: many equal ratios, ratios that no cell resolves, and tokens that one of the models never draws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import transport
from spectr_jax.decoding import Policy
from spectr_jax.decoding.drafting import RULES
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import parse
from spectr_jax.decoding.verifiers import Block, Layer, MultiPath, TokenByToken, Traversal
from spectr_jax.testing import chi_square
from spectr_jax.transport.base import draw

CALLS, FEWER, CONTEXTS = {1_024: 200_000, 8_192: 20_000}, {1_024: 25_000, 8_192: 5_000}, 2
SLOW = {"ersd", "otm_block", "otm_layer", "gbv", "traversal"}
"""These get the fewer calls."""
HEAD = 100
"""Tokens that are counted one by one; the others are counted by what kind of token they are."""
VERIFIERS = {
    "otm": (TokenByToken(transport.get("otm")), "2x1"),
    "spectr": (TokenByToken(transport.get("kseq")), "2x1"),
    "gsd": (TokenByToken(transport.get("recursive_without_replacement")), "2"),
    "ersd": (TokenByToken(transport.get("race")), "2"),
    "otm_block": (Block(transport.get("otm")), "2x2"),
    "otm_layer": (Layer(16), "2x2"),
    "gbv": (MultiPath(), "2x2"),
    "traversal": (Traversal(), "2,1"),
}


def _kinds(V):
    """[V] 0 for the head, and for the tail what is special about a token."""
    return np.where(np.arange(V) < HEAD, 0, 1 + np.arange(V) % 6)


@functools.cache
def _p_and_q(V):
    """p and q [CONTEXTS, V] in float64: what follows a token depends on its parity."""
    rng = np.random.default_rng(0)
    # Ratios of the tail by kind: equal ones, too small and too large for a cell, none of one model's.
    ratio = np.array([0, 1, 1, 2.0**-18, 200, 0, 0])[_kinds(V)]
    p, q = np.zeros((2, CONTEXTS, V))
    for context in range(CONTEXTS):
        p[context] = np.exp(1.5 * rng.standard_normal(V))
        head = p[context, :HEAD] * np.exp(rng.standard_normal(HEAD))
        p[context, _kinds(V) == 4] /= 100
        q[context] = ratio * p[context]
        q[context, :HEAD] = head
        p[context, _kinds(V) == 6], q[context, _kinds(V) == 6] = (
            0,
            rng.random(np.sum(_kinds(V) == 6)),
        )
        for pmf in (
            p[context],
            q[context],
        ):  # Half of the mass is the tail's, as much for each kind that has any.
            pmf[:HEAD] /= 2 * pmf[:HEAD].sum()
            pmf[HEAD:] /= 2 * pmf[HEAD:].sum()
    return p, q


@functools.partial(jax.jit, static_argnums=(0, 1))
def _emitted(verifier, tree, keys, p, q):
    """The first two tokens of each call; a call that emits one is continued by the target."""

    def call(key):
        draft_key, verify_key, last_key = jax.random.split(key, 3)
        tokens = jnp.zeros(1, jnp.int32)
        for nodes in tree.levels[1:]:  # As `drafting.draft` does it.
            parents = (
                tree.inner_rank[tree.parent[nodes]] - tree.inner_rank[tree.parent[nodes]].min()
            )
            at = tokens[np.unique(tree.parent[nodes])] % CONTEXTS
            depth = int(tree.depth[nodes[0]]) - 1
            rule_key = verify_key if verifier.rule == "race" else draft_key
            drawn = RULES[verifier.rule](
                jax.random.fold_in(rule_key, depth), p[at], np.bincount(parents)
            )
            tokens = jnp.concatenate([tokens, drawn[parents, tree.sibling_rank[nodes]]])
        scored = ScoredTree(
            tree=tree,
            policy=Policy(),
            length=jnp.int32(0),
            tokens=tokens,
            p=p[tokens[tree.inner] % CONTEXTS],
            logits=jnp.log(q)[tokens % CONTEXTS],
        )
        chosen = verifier(verify_key, scored)
        first = chosen.tokens[0]
        continued = draw(last_key, q[first % CONTEXTS])
        return jnp.stack([first, jnp.where(chosen.emitted > 1, chosen.tokens[1], continued)])

    return jax.lax.map(call, keys, batch_size=50)


@pytest.mark.optimized
@pytest.mark.parametrize("V", CALLS)
@pytest.mark.parametrize(
    "name",
    [name if name == "otm" else pytest.param(name, marks=pytest.mark.slow) for name in VERIFIERS],
)
def test_two_tokens_follow_the_target(name, V):
    verifier, tree = VERIFIERS[name]
    p, q = _p_and_q(V)
    keys = jax.random.split(jax.random.key(7), (FEWER if name in SLOW else CALLS)[V])
    first, second = np.asarray(
        _emitted(verifier, parse(tree), keys, jnp.float32(p), jnp.float32(q))
    ).T
    cell = np.where(np.arange(V) < HEAD, np.arange(V), HEAD + _kinds(V))
    expected = np.stack([np.bincount(cell, pmf) for pmf in q])
    assert (
        chi_square.p_value(np.bincount(cell[first], minlength=len(expected[0])), expected[0]) > 1e-4
    )
    for context in range(CONTEXTS):
        after = second[first % CONTEXTS == context]
        assert (
            chi_square.p_value(
                np.bincount(cell[after], minlength=len(expected[0])), len(after) * expected[context]
            )
            > 1e-4
        )
