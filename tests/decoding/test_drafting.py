"""The draft's cache: after a commit it must be what a fresh run on the committed text would have left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import drafting, tree
from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.models.cache import Cache
from spectr_jax.models.transformer import Transformer, TransformerConfig, causal

SHAPE = TransformerConfig(layers=2, width=32, mlp=64, heads=4, vocab_size=17, context=32)
LENGTHS = np.array([1, 2, 5])
PATHS = {  # Accepted nodes of each text, by tree.
    "chain": (tree.chain(3), [[], [1], [1, 2, 3]]),
    "chains": (tree.iid_chains(3, 2), [[2], [3, 6], [1]]),
    "tree": (tree.Tree((0, 0, 1, 2, 2, 4, 5)), [[2, 5, 7], [2, 4, 6], [1, 3]]),
}


@pytest.fixture(scope="module")
def model():
    return Transformer(SHAPE, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("case", PATHS)
def test_every_level_and_every_call_sees_the_right_text(model, case):
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
    def full(tokens_N):
        positions = jnp.arange(len(tokens_N))[None]
        logits, _ = nnx.merge(graphdef, state).extend(tokens_N[None], positions, causal(jnp.zeros((1, len(tokens_N)))))
        return probabilities(logits[0], Policy())

    @jax.jit
    def call(key, text, lengths, cache):
        return drafting.draft(
            jax.random.split(key, 3), nnx.merge(graphdef, state), drafting.RULES["iid"], shape, Policy(), text, lengths, cache
        )

    def check(drafts, text, lengths):
        for row in range(3):
            spelled = list(text[row, : lengths[row]])
            for index, node in enumerate(shape.inner):
                ancestors = np.flatnonzero(shape.ancestors[node])[1:]
                whole = np.zeros(24, np.int32)
                tokens = spelled + [int(drafts.tokens[row, ancestor]) for ancestor in ancestors]
                whole[: len(tokens)] = tokens
                np.testing.assert_allclose(drafts.p[row, index], full(whole)[len(tokens) - 1], atol=1e-5)

    positions = np.broadcast_to(np.arange(8), (3, 8))
    _, cache = jax.jit(lambda: model.extend(text[:, :8], positions, causal(jnp.zeros((3, 8))), model.init_cache(3, 32)))()
    first = call(jax.random.key(0), text, lengths, Cache(cache.rows, drafting.committed_length(lengths)))
    check(first, text, LENGTHS)

    new_lengths = LENGTHS + 1 + np.array([len(nodes) for nodes in accepted])
    for row, nodes in enumerate(accepted):
        emitted = [int(first.tokens[row, node]) for node in nodes] + [int(rng.integers(1, 17))]
        text[row, LENGTHS[row] : new_lengths[row]] = emitted
    committed = drafting.commit(first.cache, shape, jnp.asarray(path), lengths, jnp.asarray(new_lengths))
    check(call(jax.random.key(1), text, jnp.asarray(new_lengths), committed), text, new_lengths)
