"""Recorded calls say what the generation did."""

import jax
import numpy as np
import pytest

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.experiments.measure.trace import read_calls, recorder
from spectr_jax.models.table import TableModel, perturbed, random_table

VOCAB, EOS, NEW = 5, 4, 9
TARGET = random_table(0, VOCAB)
DRAFT = perturbed(TARGET, 1, 0.8)
PROMPTS, LENGTHS = (
    np.array([[1, 2, 3], [2, 0, 0], [0, 1, 0], [3, 3, 3]] * 4),
    np.array([3, 1, 2, 3] * 4),
)


def _record(method):
    models = TableModel(TARGET), TableModel(DRAFT)
    observe = recorder(PROMPTS.shape[1] + NEW)
    return generate(
        jax.random.key(0), method, *models, PROMPTS, LENGTHS, NEW, Policy(eos=EOS), observe
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("otm_block", {"tree": "2,2,1"}, marks=pytest.mark.slow),
        pytest.param("otm_layer", {"tree": "2,2,1"}, marks=pytest.mark.slow),
        pytest.param("gsd", {"tree": "3,1"}, marks=pytest.mark.slow),
        ("speculative", {"draft_length": 2}),
    ],
)
def test_calls_are_what_happened(name, options):
    method = get_method(name, **options)
    tree, generation = method.tree, _record(method)
    origins, cut, repeated = set(), 0, 0
    for row, length in enumerate(LENGTHS):
        text = np.asarray(generation.tokens[row, : generation.lengths[row]]).tolist()
        calls = read_calls(tree, generation, row)
        assert len(calls) == generation.target_calls[row]
        assert [token for call in calls for token in call.emitted] == text[length:]
        for call in calls:
            assert call.tokens[0] == text[call.start - 1]
            assert set(call.path) <= set(call.live) and {
                tree.parent[node] for node in call.live
            } <= {0, *call.live}
            for node in range(1, tree.size + 1):
                spelled = call.tokens[np.flatnonzero(tree.ancestors[node])[1:]].tolist()
                assert (node in call.live) == (
                    spelled == list(call.emitted[: len(spelled)])
                    and tree.depth[node] <= len(call.path)
                )
            repeated += len(call.live) > len(call.path)
            accepted = call.emitted[: len(call.path)]
            assert accepted == tuple(call.tokens[list(call.path)])
            assert call.origins[: len(call.path)] == ("accepted",) * len(call.path)
            rest = call.origins[len(call.path) :]
            assert len(call.emitted) == len(call.origins) and len(rest) <= 1
            assert rest == () or rest == (
                ("bonus",) if len(call.path) == tree.height else ("correction",)
            )
            cut += not rest
            origins |= set(call.origins)
            before = (0, *text[: call.start])[-2:]
            for node in range(1, tree.size + 1):
                above = int(tree.parent[node])
                spelled = [
                    *before,
                    *call.tokens[[*np.flatnonzero(tree.ancestors[above])[1:], node]],
                ]
                at = spelled[-3], spelled[-2], spelled[-1]
                assert call.q[node] == pytest.approx(TARGET[at], rel=1e-4)
                assert call.p[node] == pytest.approx(DRAFT[at], rel=1e-4)
    assert origins == {"accepted", "correction", "bonus"} and cut  # The cases are not vacuous.
    assert bool(repeated) == (name in ("otm_block", "otm_layer"))


def test_the_baseline_has_no_drafts():
    method = get_method("baseline")
    generation = _record(method)
    for row, length in enumerate(LENGTHS):
        calls = read_calls(method.tree, generation, row)
        assert [call.origins for call in calls] == [("target",)] * len(calls)
        assert [call.start for call in calls] == list(range(length, int(generation.lengths[row])))


@pytest.mark.slow
def test_recording_changes_no_text():
    method = get_method("otm_block", tree="2,2,1")
    models = TableModel(TARGET), TableModel(DRAFT)
    plain = generate(jax.random.key(0), method, *models, PROMPTS, LENGTHS, NEW, Policy(eos=EOS))
    np.testing.assert_array_equal(plain.tokens, _record(method).tokens)
    assert recorder(7) is recorder(7)  # So that the second call compiles nothing.
