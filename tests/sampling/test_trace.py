"""Tests that recorded calls agree with the generated tokens and the models."""

import jax
import numpy as np
import pytest

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.sampling.trace import read_calls, recorder

VOCAB, EOS, NEW = 5, 4, 9
TARGET = random_table(0, VOCAB)
DRAFT = perturbed(TARGET, 1, 0.8)
PROMPTS = np.array([[1, 2, 3], [2, 0, 0], [0, 1, 0], [3, 3, 3]] * 4)
LENGTHS = np.array([3, 1, 2, 3] * 4)


def _generate(method, **options):
    models, policy = (TableModel(TARGET), TableModel(DRAFT)), Policy(eos=EOS)
    return generate(jax.random.key(0), method, *models, PROMPTS, LENGTHS, NEW, policy, **options)


def _record(method):
    return _generate(method, observe=recorder(PROMPTS.shape[1] + NEW))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("otm_block", {"tree": "2,2,1"}, marks=pytest.mark.slow),
        ("speculative", {"draft_length": 2}),
    ],
)
def test_recorded_calls_agree_with_the_generation(name, options):
    method = get_method(name, **options)
    tree, generation = method.tree, _record(method)
    np.testing.assert_array_equal(generation.tokens, _generate(method).tokens)
    assert recorder(7) is recorder(7)  # A new object would recompile the second call.
    origins, cut, repeated = set(), 0, 0
    for row, prompt_length in enumerate(LENGTHS):
        text = np.asarray(generation.tokens[row, : generation.lengths[row]]).tolist()
        calls = read_calls(tree, generation, row)
        assert len(calls) == generation.target_calls[row]
        assert [token for call in calls for token in call.emitted] == text[prompt_length:]
        for call in calls:
            assert call.tokens[0] == text[call.start - 1]
            length = len(call.path)
            assert set(call.path) <= set(call.live)
            assert {tree.parent[node] for node in call.live} <= {0, *call.live}
            for node in range(1, tree.size + 1):
                spelled = call.tokens[np.flatnonzero(tree.ancestors[node])[1:]].tolist()
                is_emitted = spelled == list(call.emitted[: len(spelled)])
                assert (node in call.live) == (is_emitted and tree.depth[node] <= length)
                at = tuple([0, *text[: call.start], *spelled][-3:])
                assert call.q[node] == pytest.approx(TARGET[at], rel=1e-4)
                assert call.p[node] == pytest.approx(DRAFT[at], rel=1e-4)
            repeated += len(call.live) > length
            assert call.emitted[:length] == tuple(call.tokens[list(call.path)])
            assert call.origins[:length] == ("accepted",) * length
            rest = call.origins[length:]
            assert len(call.emitted) == len(call.origins)
            assert rest in [(), ("bonus",) if length == tree.height else ("correction",)]
            cut += not rest
            origins |= set(call.origins)
    assert origins == {"accepted", "correction", "bonus"} and cut  # Every case must occur.
    assert bool(repeated) == (name in ("otm_block", "otm_layer"))


def test_baseline_calls_record_only_target_tokens():
    method = get_method("baseline")
    generation = _record(method)
    for row, length in enumerate(LENGTHS):
        calls = read_calls(method.tree, generation, row)
        assert [call.origins for call in calls] == [("target",)] * len(calls)
        assert [call.start for call in calls] == list(range(length, int(generation.lengths[row])))
