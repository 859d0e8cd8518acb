"""The linear program over all lossless verifiers, where its optimum is known, and that no verifier of ours exceeds it."""

import jax
import numpy as np
import pytest

from spectr_jax.decoding import get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.tree import Tree, batch, chain, prefix_tree
from spectr_jax.experiments.planning import optimum
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.transport import otm
from spectr_jax.utils.errors import UserError

VOCAB, PROMPT, TEXTS = 3, (1, 2), 20_000
TARGET = random_table(0, VOCAB)
DRAFT = perturbed(TARGET, 1, 0.8)


def _pmf(table):
    return lambda sequence: table[(*PROMPT, *sequence)[-2:]]


def _most(tree):
    return optimum.most_tokens(_pmf(DRAFT), _pmf(TARGET), tree)


@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_one_level_is_the_optimal_plan(drafts):
    assert _most(batch(drafts)) == pytest.approx(
        1 + otm.acceptance(DRAFT[PROMPT], TARGET[PROMPT], drafts), abs=1e-7
    )


def test_one_chain_is_block_verification():
    """Which is optimal for one chain: the output passes through a path with the least ratio of target and draft on it."""
    expected = 1.0
    for x in range(VOCAB):
        once = min(1.0, TARGET[PROMPT][x] / DRAFT[PROMPT][x])
        expected += DRAFT[PROMPT][x] * once
        p, q = DRAFT[PROMPT[1], x], TARGET[PROMPT[1], x]
        expected += DRAFT[PROMPT][x] * np.minimum(p, once * q).sum()
    assert _most(chain(2)) == pytest.approx(expected, abs=1e-7)


def test_where_the_draft_is_perfect_all_is_accepted():
    for tree in (prefix_tree(2, 1), Tree((0, 0, 1))):
        assert optimum.most_tokens(_pmf(TARGET), _pmf(TARGET), tree) == pytest.approx(
            tree.height + 1, abs=1e-7
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["otm_layer", "otm_block", "spectr"])
def test_no_verifier_is_above_it(name):
    tree = prefix_tree(2, 1)
    prompts, lengths = np.tile(PROMPT, (TEXTS, 1)), np.full(TEXTS, len(PROMPT))
    models = TableModel(TARGET), TableModel(DRAFT)
    seen = generate(
        jax.random.key(0),
        get_method(name, tree=tree),
        *models,
        prompts,
        lengths,
        1,
        observe=_emitted,
    ).observed
    emitted, error = np.mean(seen["emitted"]), np.std(seen["emitted"]) / np.sqrt(TEXTS)
    assert error < 0.01 and emitted < _most(tree) + 4 * error
    if name == "otm_layer":
        assert emitted > 0.98 * _most(tree) - 4 * error


def _emitted(call):
    return {"emitted": call.chosen.emitted}


def test_large_trees_are_refused():
    with pytest.raises(
        UserError, match="3 tokens on 13 nodes make more than 1,000,000 drafted trees"
    ):
        _most(batch(13))
