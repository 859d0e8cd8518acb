"""With vocabularies of real size, the first two tokens of a call follow the target.

Plans sort the tokens of small vocabularies and group those of large ones into cells by ratio. The
distributions here are hard for cells: they have many equal ratios, ratios that no cell resolves,
and tokens that one of the models never draws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import transport
from spectr_jax.decoding import Policy
from spectr_jax.decoding.policy import shaping_of
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import parse
from spectr_jax.decoding.verifiers import (
    Block,
    FromTarget,
    Layer,
    MultiPath,
    TokenByToken,
    Traversal,
)
from spectr_jax.testing import chi_square
from spectr_jax.transport import rules
from spectr_jax.transport.draws import draw

CALLS = {1_024: 100_000, 8_192: 20_000}
FEWER_CALLS = {1_024: 25_000, 8_192: 5_000}
SLOW = {"ersd", "otm_block", "otm_layer", "gbv", "traversal", "traversal_iid"}
"""Methods that get fewer calls."""
CONTEXTS = 2
HEAD = 100
"""Each of the first `HEAD` tokens is counted separately; the other tokens are counted by kind."""
VERIFIERS = {
    "otm": (TokenByToken(transport.get("otm")), "2x1"),
    "spectr": (TokenByToken(transport.get("kseq")), "2x1"),
    "gsd": (TokenByToken(transport.get("recursive_without_replacement")), "2"),
    "ersd": (TokenByToken(transport.get("race")), "2"),
    "otm_block": (Block(transport.get("otm")), "2x2"),
    "otm_layer": (Layer(16), "2x2"),
    "gbv": (MultiPath(), "2x2"),
    "traversal": (Traversal(), "2,1"),
    "traversal_iid": (Traversal(rules.IID), "2,1"),
    "recycle": (FromTarget(), "2,1"),
}


def _kinds(V):
    """Returns the kind of each token [V]: 0 in the head, 1 to 6 in the tail."""
    return np.where(np.arange(V) < HEAD, 0, 1 + np.arange(V) % 6)


@functools.cache
def p_and_q(V):
    """Returns p and q [CONTEXTS, V] in float64; the context is the parity of the last token."""
    rng, kinds = np.random.default_rng(0), _kinds(V)
    # Ratios by kind of the tail: equal, too small for a cell, too large, q = 0, and p = 0.
    ratio = np.array([0, 1, 1, 2.0**-18, 200, 0, 0])[kinds]
    p, q = np.zeros((2, CONTEXTS, V))
    for context in range(CONTEXTS):
        p[context] = np.exp(1.5 * rng.standard_normal(V))
        head = p[context, :HEAD] * np.exp(rng.standard_normal(HEAD))
        p[context, kinds == 4] /= 100
        q[context] = ratio * p[context]
        q[context, :HEAD] = head
        p[context, kinds == 6] = 0
        q[context, kinds == 6] = rng.random(np.sum(kinds == 6))
        for pmf in (p[context], q[context]):  # The head and the tail have half of the mass each.
            pmf[:HEAD] /= 2 * pmf[:HEAD].sum()
            pmf[HEAD:] /= 2 * pmf[HEAD:].sum()
    return p, q


def drafted(verifier, tree, draft_key, verify_key, p, q):
    """Returns a tree of drafts, scored by the target."""
    # Without a rule, any distinct drafts will do.
    rule = verifier.rule or rules.WITHOUT_REPLACEMENT
    tokens = jnp.zeros(1, jnp.int32)
    for depth, nodes in enumerate(tree.levels[1:]):  # As in `levels.draw`.
        ranks = tree.inner_rank[tree.parent[nodes]]
        parents = ranks - ranks.min()
        at = tokens[np.unique(tree.parent[nodes])] % CONTEXTS
        rule_key = verify_key if rule.shares_key else draft_key
        drawn = rule.draw(jax.random.fold_in(rule_key, depth), p[at], np.bincount(parents))
        tokens = jnp.concatenate([tokens, drawn[parents, tree.sibling_rank[nodes]]])
    return ScoredTree(
        tree=tree,
        shaping=shaping_of(Policy()),
        length=jnp.int32(0),
        tokens=tokens,
        p=p[:0] if verifier.rule is None else p[tokens[tree.inner] % CONTEXTS],
        logits=jnp.log(q)[tokens % CONTEXTS],
    )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _emitted(verifier, tree, keys, p, q):
    """Returns two tokens of each call; if a call emits one, the target draws the second."""

    def call(key):
        draft_key, verify_key, last_key = jax.random.split(key, 3)
        chosen = verifier(verify_key, drafted(verifier, tree, draft_key, verify_key, p, q))
        first = chosen.tokens[0]
        continued = draw(last_key, q[first % CONTEXTS])
        return jnp.stack([first, jnp.where(chosen.emitted > 1, chosen.tokens[1], continued)])

    return jax.lax.map(call, keys, batch_size=50)


def p_values(name, V, calls):
    """Returns the p-values of the first token, and of the second after each of the contexts."""
    verifier, tree = VERIFIERS[name]
    p, q = p_and_q(V)
    keys = jax.random.split(jax.random.key(7), calls)
    emitted = _emitted(verifier, parse(tree), keys, jnp.float32(p), jnp.float32(q))
    first, second = np.asarray(emitted).T
    cell = np.where(np.arange(V) < HEAD, np.arange(V), HEAD + _kinds(V))
    expected = np.stack([np.bincount(cell, pmf) for pmf in q])

    def p_value(tokens, context):
        counts = np.bincount(cell[tokens], minlength=len(expected[0]))
        return chi_square.p_value(counts, expected[context])

    after = [p_value(second[first % CONTEXTS == context], context) for context in range(CONTEXTS)]
    return [p_value(first, 0), *after]


DEFAULTS = {"otm", "otm_layer", "gsd"}
"""Those that run with users' compiler settings: plans with cells, a search, and a residual."""


def _case(name, V):
    marks = [pytest.mark.defaults] if name in DEFAULTS else []
    marks += [pytest.mark.slow] if (name, V) != ("otm", 1_024) else []
    return pytest.param(name, V, marks=marks)


@pytest.mark.optimized
@pytest.mark.parametrize(
    ("name", "V"),
    [
        *(_case(name, 1_024) for name in VERIFIERS),
        *(_case(name, 8_192) for name in ("otm", "gsd", "otm_layer")),
    ],
)
def test_two_tokens_follow_the_target_with_large_vocabularies(name, V):
    assert min(p_values(name, V, (FEWER_CALLS if name in SLOW else CALLS)[V])) > 1e-4
