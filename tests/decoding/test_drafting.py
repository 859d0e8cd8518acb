"""The draft's cache: after a commit it must be what a fresh run on the committed text would have left."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from spectr_jax.decoding import drafting, tree
from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.models.cache import Cache
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.transport.enumeration import draft_tuples

SHAPE = TransformerConfig(layers=2, width=32, mlp=64, heads=4, vocab_size=17, context=32)
LENGTHS = np.array([1, 2, 5])
PATHS = {  # Accepted nodes of each text, by tree.
    "chain": (tree.chain(3), [[], [1], [1, 2, 3]]),
    "chains": (tree.iid_chains(3, 2), [[2], [3, 6], [1]]),
    "tree": (tree.Tree((0, 0, 1, 2, 2, 4, 5)), [[2, 5, 7], [2, 4, 6], [1, 3]]),
    "leaves above": (tree.Tree((0, 0, 0, 2, 2, 3, 4)), [[2], [2, 4, 7], [3, 6]]),
}


@pytest.fixture(scope="module")
def model():
    return Transformer(SHAPE, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def full(model):
    """The distributions [N, V] behind each of N tokens, by one forward."""

    @jax.jit
    def forward(tokens_N):
        positions = jnp.arange(len(tokens_N))[None]
        logits, _ = model.extend(tokens_N[None], positions, causal(jnp.zeros((1, len(tokens_N)))))
        return probabilities(logits[0], Policy())

    return lambda tokens_N: np.asarray(forward(tokens_N))


@pytest.mark.parametrize("case", PATHS)
@pytest.mark.xdist_group("drafting")  # One program of full forwards.
def test_every_level_and_every_call_sees_the_right_text(model, full, case):
    """Two calls, with a commit between them: p at each inner node is that of a full forward on the text it spells."""
    shape, accepted = PATHS[case]
    graphdef, state = nnx.split(model)
    rng = np.random.default_rng(0)
    text = rng.integers(1, 17, (3, 20))
    lengths = jnp.asarray(LENGTHS)
    path = np.zeros((3, shape.height), np.int32)
    for row, nodes in enumerate(accepted):
        path[row, : len(nodes)] = nodes

    @jax.jit
    def call(key, text, lengths, cache):
        return drafting.draft(
            jax.random.split(key, 3),
            nnx.merge(graphdef, state),
            drafting.RULES["iid"],
            shape,
            Policy(),
            text,
            lengths,
            cache,
        )

    def check(drafts, text, lengths):
        p, drawn = np.asarray(drafts.p), np.asarray(drafts.tokens)
        for row in range(3):
            spelled = list(text[row, : lengths[row]])
            for index, node in enumerate(shape.inner):
                ancestors = np.flatnonzero(shape.ancestors[node])[1:]
                whole = np.zeros(24, np.int32)
                tokens = spelled + [int(drawn[row, ancestor]) for ancestor in ancestors]
                whole[: len(tokens)] = tokens
                np.testing.assert_allclose(p[row, index], full(whole)[len(tokens) - 1], atol=1e-5)

    positions = np.broadcast_to(np.arange(8), (3, 8))
    _, cache = jax.jit(
        lambda: model.extend(
            text[:, :8], positions, causal(jnp.zeros((3, 8))), model.init_cache(3, 32)
        )
    )()
    first = call(
        jax.random.key(0), text, lengths, Cache(cache.rows, drafting.committed_length(lengths))
    )
    check(first, text, LENGTHS)

    new_lengths = LENGTHS + 1 + np.array([len(nodes) for nodes in accepted])
    for row, nodes in enumerate(accepted):
        emitted = [int(np.asarray(first.tokens)[row, node]) for node in nodes] + [
            int(rng.integers(1, 17))
        ]
        text[row, LENGTHS[row] : new_lengths[row]] = emitted
    commit = jax.jit(functools.partial(drafting.commit, model), static_argnums=1)
    committed = commit(first.cache, shape, jnp.asarray(path), lengths, jnp.asarray(new_lengths))
    check(call(jax.random.key(1), text, jnp.asarray(new_lengths), committed), text, new_lengths)


PROBS = np.float32(
    [[0.5, 0.3, 0.15, 0.05, 0.0], [0.1, 0.2, 0.3, 0.4, 0.0], [0.0, 0.7, 0.0, 0.3, 0.0]]
)


@pytest.mark.parametrize(
    ("rule", "pmf"),
    [
        ("without_replacement", "without_replacement"),
        ("race", "race"),
        ("greedy", "greedy"),
        ("iid", "iid"),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rules_draw_from_their_pmfs(rule, pmf, count):
    """Distinct and Plackett-Luce without replacement; each node of a level by its own distribution."""
    draws = 40_000
    keys = jax.random.split(jax.random.key(count), draws)
    drawn = np.asarray(
        jax.jit(
            jax.vmap(
                lambda key: drafting.RULES[rule](
                    key, jnp.asarray(PROBS), np.full(len(PROBS), count)
                )
            )
        )(keys)
    )
    assert drawn.min() >= 0 and drawn.max() < PROBS.shape[1]
    for node, p in enumerate(PROBS):
        exact = dict(draft_tuples(p.astype(float), count, pmf))
        short = min(
            count, len(next(iter(exact)))
        )  # Behind the support anything goes, but for what is there already.
        seen, counts = np.unique(drawn[:, node, :short], axis=0, return_counts=True)
        observed = {tuple(row.tolist()): number for row, number in zip(seen, counts, strict=True)}
        assert observed.keys() <= exact.keys()
        if len(exact) > 1:
            expected = draws * np.array(list(exact.values()))
            assert (
                scipy.stats.chisquare(
                    [observed.get(row, 0) for row in exact], expected / expected.sum() * draws
                ).pvalue
                > 1e-3
            )
        if rule in ("without_replacement", "race"):
            assert all(len(set(row)) == count for row in drawn[:100, node].tolist())


def test_nodes_of_a_level_race_apart_but_for_ersd():
    same, two = {}, np.array([2, 2])
    for rule in ("without_replacement", "race", "iid"):
        keys = jax.random.split(jax.random.key(0), 1000)
        drawn = np.asarray(
            jax.jit(
                jax.vmap(
                    lambda key, rule=rule: drafting.RULES[rule](
                        key, jnp.asarray(PROBS[[0, 0]]), two
                    )
                )
            )(keys)
        )
        same[rule] = np.mean(np.all(drawn[:, 0] == drawn[:, 1], axis=-1))
    assert same["race"] == 1.0 and same["without_replacement"] < 0.5 and same["iid"] < 0.5
