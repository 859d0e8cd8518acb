"""Tests of decoding with a model split over devices, in processes with eight virtual devices."""

import json
import pathlib
from collections import Counter

import pytest

from helpers import answers, free_port, names_in, started

PROGRAM = pathlib.Path(__file__).with_name("on_devices.py")
MESHES = [(1, 8), (2, 4)]
"""Numbers of groups of devices, and of devices of a group."""


def _begun(devices, check, *process, **arguments):
    """Starts a check of on_devices.py in a process with some virtual devices."""
    return started(devices, PROGRAM, check, json.dumps(arguments), *process)


def _found(begun):
    return answers(begun)[0]


def test_logits_of_split_decoders_equal_those_of_one_device():
    found = _found(_begun(8, "logits", shapes=MESHES))
    assert len(found) == 10
    assert max(found.values()) < 1e-5


def _check_outputs(kind, method):
    found = _found(_begun(8, "outputs", kind=kind, name=method, generations=12_000))
    assert found["p"] > 1e-4
    assert found["greedy"]
    assert found["compiled"] == 0


@pytest.mark.slow
def test_outputs_of_split_tables_follow_the_target():
    """Greedy tokens equal those of one device, and a second call compiles nothing."""
    _check_outputs("table", "otm_layer")


@pytest.mark.slow
def test_outputs_of_split_decoders_follow_the_target():
    _check_outputs("llama", "otm_block")


@pytest.mark.slow
def test_published_heads_draft_the_same_tokens_on_a_mesh():
    """A copied head shares the target's split embedding; a split one has five split arrays."""
    tokens, *on_meshes = _found(_begun(8, "heads"))
    assert on_meshes == [[tokens, 1], [tokens, 5]]


@pytest.mark.slow
def test_two_processes_emit_the_tokens_of_one():
    one = _found(_begun(8, "tokens", shapes=MESHES))
    assert one["1x8"] == one["2x4"] == one["slots"] == one["context"]
    assert one["stream"] == one["alone"]
    where = f"localhost:{free_port()}"
    both = [_begun(4, "tokens", where, str(number), shapes=MESHES) for number in (0, 1)]
    for found in map(_found, both):
        assert found == {name: one[name] for name in ("1x8", "2x4", "slots")}


def test_meshes_that_do_not_fit_are_refused():
    *errors, copied, laid_out = _found(_begun(8, "refused"))
    groups = "mesh: has 2 groups of devices, which do not divide "
    beginnings = ["mesh=None: ", "model=2: ", f"{groups}3", "mesh: has axes", "model=2: "]
    beginnings += [f"{groups}1", "model='2': ", "model=8: must divide heads=6"]
    for error, beginning in zip(errors, beginnings, strict=True):
        assert error.startswith(beginning)
        assert "\n" not in error
    assert (copied, laid_out) == (1, 4)


@pytest.mark.slow
def test_selection_does_not_gather_a_vocabulary():
    """The collectives of a call's selection move less than 5 % of all logits."""
    count = names_in("scripts/dev/kernels.py").count
    V, nodes, sequences = 32_768, 13, 2
    counts = count(_found(_begun(8, "selection", vocab_size=V)), ("draft", "score", "select"))
    moved = Counter()
    for each, number in counts.collectives.items():
        moved[each.phase] += each.bytes * number
    assert moved["score"] > 0
    assert 0 < moved["select"] < 0.05 * sequences * nodes * V * 4
