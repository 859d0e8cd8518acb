"""Tests that replayed methods emit as many tokens as the methods themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.tree import Tree, chain, iid_chains, prefix_tree
from spectr_jax.experiments.measure import replay
from spectr_jax.models.table import TableModel, perturbed, random_table

TABLE = random_table(0, 4)
MODELS = TableModel(TABLE), TableModel(perturbed(TABLE, 1, 0.8))
ROWS = 5_000


def _observed(method, observe):
    """Returns the results of `observe` for one call on each of `ROWS` sequences."""
    prompts, policy = np.tile([1, 2], (ROWS, 1)), Policy(eos=3)
    lengths = np.full(ROWS, 2)
    key = jax.random.key(0)
    return generate(key, method, *MODELS, prompts, lengths, 1, policy, observe).observed


def _paths(tree):
    return {tree.path(node) for node in range(1, tree.size + 1)}


def test_a_covering_tree_contains_each_tree():
    trees = [iid_chains(3, 2), chain(4), prefix_tree(2, 2), Tree((0, 1, 1, 1))]
    whole = replay.covering(trees)
    assert _paths(whole) == set().union(*map(_paths, trees))
    for tree in trees:
        nodes = replay.part_of(whole, tree)
        assert nodes[0] == 0
        np.testing.assert_array_equal(whole.parent[nodes], nodes[tree.parent])


@pytest.mark.slow
@pytest.mark.parametrize("names", [("otm_block",), ("traversal",)], ids=["otm_block", "traversal"])
def test_replay_emits_as_many_tokens_as_decoding(names):
    trees = [prefix_tree(2, 1), prefix_tree(1, 2)]
    methods = tuple(get_method(name, tree=tree) for name in names for tree in trees)
    covering = get_method(names[0], tree=replay.covering(trees))
    seen = _observed(covering, replay.observe_replays(methods))
    assert np.all(np.asarray(seen["calls"]) == 1)
    replayed = np.asarray(seen["emitted"])
    for index, method in enumerate(methods):
        first = _observed(method, _emitted)["emitted"]
        error = np.hypot(np.std(first), np.std(replayed[:, index])) / np.sqrt(ROWS)
        assert abs(np.mean(first) - np.mean(replayed[:, index])) < 4.5 * error, method
        assert error < 0.03 < np.mean(first) - 1


def _emitted(call):
    """Returns the number of emitted tokens up to EOS, before `max_new_tokens` cuts them."""
    tokens, emitted = call.chosen.tokens, call.chosen.emitted
    is_eos = (tokens == 3) & (jnp.arange(len(tokens)) < emitted)
    return {"emitted": jnp.where(jnp.any(is_eos), jnp.argmax(is_eos) + 1, emitted)}


def test_only_methods_with_reusable_drafts_can_be_replayed():
    """A part of a drafted tree must follow the drafting rule. This holds for i.i.d. drafts and for
    drafts without replacement, but not for the races of `ersd`."""
    names = ("otm", "traversal", "ersd", "lookup", "baseline")
    found = [name for name in names if replay.can_be_replayed(get_method(name))]
    assert found == ["otm", "traversal"]
