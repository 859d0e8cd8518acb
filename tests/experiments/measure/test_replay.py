"""Replayed walks emit what the methods themselves emit."""

import itertools

import jax
import numpy as np
import pytest

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.tree import Tree, batch, chain, iid_chains, prefix_tree
from spectr_jax.experiments.measure import replay
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.utils.errors import UserError

TABLE = random_table(0, 4)
MODELS = TableModel(TABLE), TableModel(perturbed(TABLE, 1, 0.8))
TEXTS = 5_000


def _observed(method, observe):
    """Of one call for each text."""
    prompts, lengths = np.tile([1, 2], (TEXTS, 1)), np.full(TEXTS, 2)
    return generate(
        jax.random.key(0), method, *MODELS, prompts, lengths, 1, Policy(eos=3), observe
    ).observed


def test_a_covering_tree_has_each_tree_as_a_part():
    trees = [iid_chains(3, 2), chain(4), prefix_tree(2, 2), Tree((0, 1, 1, 1))]
    whole = replay.covering(trees)
    assert {whole.path(node) for node in range(1, whole.size + 1)} == {
        *itertools.chain.from_iterable(
            [tree.path(node) for node in range(1, tree.size + 1)] for tree in trees
        )
    }
    for tree in trees:
        nodes = replay.part_of(whole, tree)
        assert nodes[0] == 0
        np.testing.assert_array_equal(whole.parent[nodes], nodes[tree.parent])
    with pytest.raises(UserError, match=r"has no node \(3,\)"):
        replay.part_of(whole, batch(4))


@pytest.mark.slow
@pytest.mark.parametrize("names", [("otm_block",), ("traversal",)])
def test_a_part_emits_what_the_method_emits(names):
    trees = [prefix_tree(2, 1), prefix_tree(1, 2)]
    methods = tuple(get_method(name, tree=tree) for name in names for tree in trees)
    seen = _observed(
        get_method(names[0], tree=replay.covering(trees)), replay.observe_replays(methods)
    )
    assert np.all(np.asarray(seen["calls"]) == 1)
    replayed = np.asarray(seen["emitted"])
    for index, method in enumerate(methods):
        first = _observed(method, _emitted)["emitted"]
        error = np.hypot(np.std(first), np.std(replayed[:, index])) / np.sqrt(TEXTS)
        assert abs(np.mean(first) - np.mean(replayed[:, index])) < 4.5 * error, method
        assert error < 0.03 < np.mean(first) - 1


def _emitted(call):
    """Up to EOS, whatever the limit."""
    tokens, emitted = call.chosen.tokens, call.chosen.emitted
    is_eos = (tokens == 3) & (jax.numpy.arange(len(tokens)) < emitted)
    return {
        "emitted": jax.numpy.where(jax.numpy.any(is_eos), jax.numpy.argmax(is_eos) + 1, emitted)
    }


def test_what_cannot_be_replayed_is_refused():
    with pytest.raises(UserError, match="'ersd' drafts by the rule 'race'"):
        replay.observe_replays((get_method("ersd"),))
    with pytest.raises(UserError, match="'gsd' drafts by the rule 'without_replacement'"):
        replay.observe_replays((get_method("otm"), get_method("gsd")))
