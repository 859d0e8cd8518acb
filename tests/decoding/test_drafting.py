"""Drafting rules draw from their distributions, and drafting with a cache equals a run without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax import transport
from spectr_jax.decoding import Method, tree
from spectr_jax.decoding.drafters import DraftModel, Sequences, Verified, levels
from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.request import request_of
from spectr_jax.decoding.verifiers import TokenByToken
from spectr_jax.models.cache import Cache
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.testing import chi_square
from spectr_jax.transport import rules

SHAPE = TransformerConfig(layers=2, width=32, mlp=64, heads=4, vocab_size=17, context=32)
LENGTHS = np.array([1, 2, 5])
PATHS = {  # Each tree, with the accepted nodes of each sequence.
    "one chain": (tree.chain(3), [[], [1], [1, 2, 3]]),
    "two chains": (tree.iid_chains(3, 2), [[2], [3, 6], [1]]),
    "uneven tree": (tree.Tree((0, 0, 1, 2, 2, 4, 5)), [[2, 5, 7], [2, 4, 6], [1, 3]]),
    "leaves on all levels": (tree.Tree((0, 0, 0, 2, 2, 3, 4)), [[2], [2, 4, 7], [3, 6]]),
}


@pytest.fixture(scope="module")
def model():
    return Transformer(SHAPE, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def full(model):
    """Returns a function from tokens [N] to the distributions [N, V] after each token."""

    @jax.jit
    def forward(tokens_N):
        positions = jnp.arange(len(tokens_N))[None]
        logits, _ = model.extend(tokens_N[None], positions, causal(jnp.zeros((1, len(tokens_N)))))
        return probabilities(logits[0], Policy())

    return lambda tokens_N: np.asarray(forward(tokens_N))


@pytest.mark.parametrize("case", PATHS)
@pytest.mark.xdist_group("drafting")  # The tests share the program of `full`.
def test_draft_probabilities_equal_those_of_a_full_forward_pass(model, full, case):
    """Checks two calls, with a commit between them."""
    shape, accepted = PATHS[case]
    frozen = freeze(model)
    method = Method("", shape, TokenByToken(transport.get("maximal")))
    rng = np.random.default_rng(0)
    sequences = rng.integers(1, 17, (3, 20))
    lengths = jnp.asarray(LENGTHS)
    path = np.zeros((3, shape.height), np.int32)
    for row, nodes in enumerate(accepted):
        path[row, : len(nodes)] = nodes

    def setup():
        started = Sequences(sequences, lengths)
        return request_of(jax.random.key(0), method, frozen, frozen, started, 12, 12).setup()

    @jax.jit
    def call(key, sequences, lengths, cache):
        keys, committed = jax.random.split(key, 3), Sequences(sequences, lengths)
        return DraftModel().draft(setup(), keys, committed, cache, cache)

    @jax.jit
    def commit(cache, path, before, after):
        verified = Verified(None, None, None, path, before, Sequences(None, after))
        return DraftModel().commit(setup(), cache, verified)

    def check(drafts, sequences, lengths):
        p, drawn = np.asarray(drafts.p), np.asarray(drafts.tokens)
        for row in range(3):
            spelled = list(sequences[row, : lengths[row]])
            for index, node in enumerate(shape.inner):
                ancestors = np.flatnonzero(shape.ancestors[node])[1:]
                whole = np.zeros(24, np.int32)
                tokens = spelled + [int(drawn[row, ancestor]) for ancestor in ancestors]
                whole[: len(tokens)] = tokens
                np.testing.assert_allclose(p[row, index], full(whole)[len(tokens) - 1], atol=1e-5)

    positions = np.broadcast_to(np.arange(8), (3, 8))
    start = sequences[:, :8], positions, causal(jnp.zeros((3, 8)))
    _, cache = jax.jit(lambda: model.extend(*start, model.init_cache(3, 32)))()
    cache = Cache(cache.rows, levels.cache_lengths(lengths))
    first = call(jax.random.key(0), sequences, lengths, cache)
    check(first, sequences, LENGTHS)

    new_lengths = LENGTHS + 1 + np.array([len(nodes) for nodes in accepted])
    for row, nodes in enumerate(accepted):
        accepted_tokens = np.asarray(first.tokens)[row, np.array(nodes, int)]
        sequences[row, LENGTHS[row] : new_lengths[row]] = [*accepted_tokens, rng.integers(1, 17)]
    committed = commit(first.state, jnp.asarray(path), lengths, jnp.asarray(new_lengths))
    check(
        call(jax.random.key(1), sequences, jnp.asarray(new_lengths), committed),
        sequences,
        new_lengths,
    )


PROBS = np.float32(
    [
        [0.5, 0.3, 0.15, 0.05, 0.0],
        [0.1, 0.2, 0.3, 0.4, 0.0],
        [0.0, 0.7, 0.0, 0.3, 0.0],
        [0.0, 0.0, 0.0, 0.3, 0.7],
    ]
)


def _drawn(rule, probs, count, draws, seed):
    """Returns the tokens [draws, nodes, count] that a rule draws with one key per draw."""

    def draw(key):
        return rule.draw(key, jnp.asarray(probs), np.full(len(probs), count))

    keys = jax.random.split(jax.random.key(seed), draws)
    return np.asarray(jax.jit(jax.vmap(draw))(keys))


RULES = rules.WITHOUT_REPLACEMENT, rules.RACE, rules.GREEDY, rules.IID


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rules_draw_from_their_pmfs(rule, count):
    """Each node of a level draws from its own distribution, and distinct tokens by most rules."""
    draws = 40_000
    drawn = _drawn(rule, PROBS, count, draws, seed=count)
    assert drawn.min() >= 0 and drawn.max() < PROBS.shape[1]
    for node, p in enumerate(PROBS):
        exact = dict(rule.sequences(p.astype(float), count))
        # Once the support of p is exhausted, tokens are only required to be distinct.
        short = min(count, len(next(iter(exact))))
        seen, counts = np.unique(drawn[:, node, :short], axis=0, return_counts=True)
        observed = {tuple(row.tolist()): number for row, number in zip(seen, counts, strict=True)}
        assert observed.keys() <= exact.keys()
        found = np.array([observed.get(row, 0) for row in exact])
        assert chi_square.p_value(found, np.array(list(exact.values()))) > 1e-3
        if rule.distinct:
            assert all(len(set(row)) == count for row in drawn[:100, node].tolist())


def test_only_races_share_randomness_between_nodes_of_a_level():
    for rule in (rules.WITHOUT_REPLACEMENT, rules.RACE, rules.IID):
        drawn = _drawn(rule, PROBS[[0, 0]], 2, 1000, seed=0)
        same = np.mean(np.all(drawn[:, 0] == drawn[:, 1], axis=-1))
        assert same == 1 if rule.shares_key else same < 0.5
