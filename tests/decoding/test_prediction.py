"""Expected tokens of block verification, against enumeration and against what decoding does where all nodes are alike."""

import itertools

import jax
import numpy as np
import pytest

from spectr_jax.decoding import generate, get_method, prediction
from spectr_jax.decoding.tree import batch
from spectr_jax.errors import UserError
from spectr_jax.measure.acceptance import observe_winners, shares
from spectr_jax.models.table import TableModel

pytestmark = pytest.mark.xdist_group("prediction")  # The winners are counted once.
# Ratios 1/2, 1 and 2: on the grid.
P, Q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
TEXTS = 4_000


def _everywhere(law):
    """A model that has one law, so that all nodes are alike."""
    return TableModel(np.broadcast_to(law, (len(law), len(law), len(law))))


@pytest.fixture(scope="module")
def winners():
    observed = _decode(get_method("otm", tree=batch(4)), observe_winners).observed
    return {name: shares(np.asarray(counts, float).sum(axis=0)) for name, counts in observed.items()}


def _decode(method, observe=None):
    prompts = np.ones((TEXTS, 1), np.int32)
    models = _everywhere(Q), _everywhere(P)
    return generate(jax.random.key(0), method, *models, prompts, np.ones(TEXTS), 12, observe=observe)


def _chain_winners():
    """The table of one draft, exact."""
    table = np.zeros((2, prediction.RATIOS, 2))
    table[0, 0, 0] = 1
    for p, q in zip(P, Q, strict=True):
        table[1, int(prediction.ratio_cell(q / p)), 1] += p
    return table


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_chain_is_the_sum_over_its_paths(length):
    exact = 1.0
    for path in itertools.chain.from_iterable(itertools.product(range(3), repeat=n) for n in range(1, length + 1)):
        run = 1.0
        for token in path:
            run = min(1.0, run * Q[token] / P[token])
        exact += np.prod(P[list(path)]) * run
    assert prediction.block_predictor(_chain_winners())([1] * length) == pytest.approx(exact, abs=1e-9)


def test_what_is_seen_of_one_draft_is_its_law(winners):
    np.testing.assert_allclose(winners["otm"][1, :, :2], _chain_winners()[1], atol=0.01)
    np.testing.assert_allclose(winners["greedy_multipath"][1, :, :2], _chain_winners()[1], atol=0.01)


@pytest.mark.parametrize(("name", "plan"), [("otm_block", "otm"), ("gbv", "greedy_multipath")])
@pytest.mark.parametrize("branching", [(1, 1, 1), (2, 1, 1), (2, 2), (4,)])
def test_trees_emit_what_is_predicted(winners, name, plan, branching):
    """Before the limit cuts what a call emits: by Wald's identity the mean over calls is that of one call."""
    predicted = prediction.block_predictor(winners[plan])(branching)
    tree = ",".join(map(str, branching))
    generation = _decode(get_method(name, tree=tree), _emitted)
    measured = np.sum(generation.observed["emitted"]) / np.sum(generation.target_calls)
    assert measured == pytest.approx(predicted, abs=0.03)


def _emitted(call):
    return {"emitted": call.chosen.emitted}


def test_drafts_that_were_not_measured_are_refused(winners):
    with pytest.raises(UserError, match="may have 8 live drafts, measured are 4"):
        prediction.block_predictor(winners["otm"])((4, 2))
