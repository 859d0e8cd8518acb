"""Compares predicted tokens per call with enumeration, and with decoding where nodes are alike."""

import itertools

import jax
import numpy as np
import pytest

from spectr_jax.decoding import METHODS, Method, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.tree import Tree, batch, prefix_tree
from spectr_jax.experiments.measure.acceptance import observe_drafts, shares
from spectr_jax.experiments.planning import prediction
from spectr_jax.models.table import TableModel
from spectr_jax.utils.errors import UserError

pytestmark = pytest.mark.xdist_group("prediction")  # The tests share one count of the winners.
# The ratios Q / P are 1/2, 1 and 2, which lie on the grid of ratios.
P, Q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
ROWS = 4_000


def _everywhere(pmf):
    """Returns a model with one distribution for all contexts, so that all nodes are alike."""
    return TableModel(np.broadcast_to(pmf, (len(pmf),) * 3))


@pytest.fixture(scope="module")
def winners():
    """Returns the observed table of winners for up to 4 drafts, by method."""
    observe = observe_drafts((get_method("otm_block"), get_method("gbv_conditional")))
    observed = _decode(get_method("otm", tree=batch(4)), observe).observed
    counts = {name: np.asarray(rows, float).sum(axis=0) for name, rows in observed.items()}
    return {name: shares(total) for name, total in counts.items()}


def _decode(method, observe=None):
    models, prompts = (_everywhere(Q), _everywhere(P)), np.ones((ROWS, 1), np.int32)
    arguments = method, *models, prompts, np.ones(ROWS), 12
    return generate(jax.random.key(0), *arguments, observe=observe)


def _chain_winners():
    """Returns the exact table of winners for one draft."""
    table = np.zeros((2, prediction.RATIOS, 2))
    table[0, 0, 0] = 1
    for p, q in zip(P, Q, strict=True):
        table[1, int(prediction.ratio_cell(q / p)), 1] += p
    return table


@pytest.mark.parametrize("length", [1, 2, 5])
def test_the_prediction_for_a_chain_equals_enumeration(length):
    exact = 1.0
    for depth in range(1, length + 1):
        for path in itertools.product(range(3), repeat=depth):
            run = 1.0
            for token in path:
                run = min(1.0, run * Q[token] / P[token])
            exact += np.prod(P[list(path)]) * run
    predicted = prediction.block_predictor(_chain_winners())([1] * length)
    assert predicted == pytest.approx(exact, abs=1e-9)


@pytest.mark.slow
def test_observed_winners_of_one_draft_match_the_exact_table(winners):
    np.testing.assert_allclose(winners["otm_block"][1, :, :2], _chain_winners()[1], atol=0.01)
    np.testing.assert_allclose(winners["gbv_conditional"][1, :, :2], _chain_winners()[1], atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["otm_block", "gbv_conditional"])
@pytest.mark.parametrize("branching", [(2, 1, 1), (2, 2)], ids=["2,1,1", "2,2"])
def test_trees_emit_the_predicted_number_of_tokens(winners, name, branching):
    """Emitted tokens are counted before `max_new_tokens` cuts them, so Wald's identity holds."""
    predicted = prediction.predictor(get_method(name), winners[name])(prefix_tree(*branching))
    tree = ",".join(map(str, branching))
    generation = _decode(get_method(name, tree=tree), _emitted)
    measured = np.sum(generation.observed["emitted"]) / np.sum(generation.target_calls)
    assert measured == pytest.approx(predicted, abs=0.03)


def _emitted(call):
    return {"emitted": call.chosen.emitted}


@pytest.mark.slow
def test_trees_with_more_drafts_than_measured_are_refused(winners):
    with pytest.raises(UserError, match=r"tree=\(4, 2\)"):
        prediction.block_predictor(winners["otm_block"])((4, 2))


def test_every_method_has_the_statistic_of_its_verifier():
    named: dict = {}
    for name in METHODS:
        named.setdefault(prediction.statistic(get_method(name)), set()).add(name)
    unknown = {"baseline", "greedy_drafts", "lookup", "recycle", "self_speculative"}
    assert named[None] == unknown | {"otm_layer", "traversal", "gbv"}
    assert named["winners"] == {"block", "otm_block", "gbv_conditional"}
    assert named["children"] == {"gsd", "ersd"}
    assert prediction.statistic(Method("other", batch(2), get_method("otm").verifier)) == "carriers"


def test_predictions_from_known_acceptance_are_exact():
    tree, halves = Tree((0, 0, 1)), np.array([0.5, 0.25])
    distinct = prediction.predictor(get_method("gsd"), halves)
    assert distinct(tree) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    carriers = np.array([[1, 0, 0], [0.4, 0.6, 0], [0.3, 0.7, 0]])
    iid = prediction.predictor(get_method("otm"), carriers)
    assert iid(prefix_tree(2, 1)) == pytest.approx(1 + 0.7 * 1.6)
    with pytest.raises(UserError, match=r"parents=\(0, 0, 1\)"):
        iid(tree)
