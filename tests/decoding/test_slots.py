"""Sequences through slots are those of `generate`, whatever the slots and the order of prompts."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import Policy, bias, generate_all, get_method, running, slots
from spectr_jax.decoding.generate import generate
from spectr_jax.models.eagle3 import Eagle3, Eagle3Config
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.table import TableModel, perturbed, random_table
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError

VOCAB, NEW, KEY = 13, 12, jax.random.key(5)
LENGTHS = [3, 1, 20, 5, 2, 9, 4, 4, 21, 1]
PROMPTS = [
    np.random.default_rng(index).integers(0, VOCAB, length).tolist()
    for index, length in enumerate(LENGTHS)
]
N = len(PROMPTS)
POLICY = Policy(
    temperature=np.where(np.arange(N) % 3, 1.0, 0.0),
    top_k=np.where(np.arange(N) % 4, 0, 5),
    eos=(7, 11),
    process=bias({2: 0.5}),
)
SHAPE = {"width": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_width": 8}
CONFIG = LlamaConfig(layers=2, **SHAPE, vocab_size=VOCAB, context=128)
TARGET = Llama(CONFIG, rngs=nnx.Rngs(0))
DRAFT = Llama(dataclasses.replace(CONFIG, layers=1), rngs=nnx.Rngs(1))
HEAD_SHAPE = vars(DRAFT.config) | {"head_tokens": 9}
HEAD = Eagle3(Eagle3Config(**HEAD_SHAPE, target_width=32, target_layers=(1, 2)), rngs=nnx.Rngs(1))
TREE = {"tree": "2,1"}
CASES = {
    "otm_layer": (get_method("otm_layer", **TREE), DRAFT),
    "otm_block with features": (get_method("otm_block", **TREE), HEAD),
    "recycle": (get_method("recycle", **TREE, ranks=2), None),
    "self_speculative": (get_method("self_speculative", layers=1, method="gsd", **TREE), None),
}
"""A method for each state of a drafter: a cache, features, a table, and none."""


def observe(call):
    return {"emitted": call.chosen.emitted, "lengths": call.scored.length[None]}


def _padded(prompts):
    rows = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    return rows, [len(prompt) for prompt in prompts]


def _assert_equal(completions, expected, prompts):
    """Checks that the completions are the rows of a generation, each once."""
    completions = list(completions)
    assert sorted(done.index for done in completions) == list(range(len(prompts)))
    for done in completions:
        row = done.index
        length = int(expected.lengths[row])
        assert done.tokens.tolist() == expected.tokens[row, :length].tolist()
        assert done.prompt_length == len(prompts[row])
        assert done.target_calls == int(expected.target_calls[row])
        np.testing.assert_array_equal(done.emitted_per_call, expected.emitted_per_call[row])
        if expected.observed is not None:
            for name, values in expected.observed.items():
                np.testing.assert_array_equal(done.observed[name], values[row])
        for own, rows in zip(done.logprobs or (), expected.logprobs or (), strict=True):
            assert own.shape == (length,)
            np.testing.assert_allclose(own, rows[row, :length], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case", ["otm_layer", *(pytest.param(case, marks=pytest.mark.slow) for case in [*CASES][1:])]
)
def test_sequences_are_those_of_generate(case, count_compilations):
    """Stops, EOS, the limit, mixed policies, log-probabilities; two orders of prompts."""
    (method, draft), options = CASES[case], {"logprobs": True, "stop": [[3, 4], [9]]}
    options |= {"policy": POLICY, "observe": observe, "draft_policy": Policy(0.7)}
    models = method, TARGET, draft
    for prompts in (PROMPTS, PROMPTS[::-1]) if case == "otm_layer" else (PROMPTS,):
        expected = generate(KEY, *models, *_padded(prompts), NEW, **options)
        assert len(set(np.asarray(expected.lengths) - [len(each) for each in prompts])) > 2
        with count_compilations() as compiled:
            completions = list(generate_all(KEY, *models, prompts, NEW, slots=4, **options))
        assert prompts is PROMPTS or not compiled
        _assert_equal(completions, expected, prompts)


@pytest.mark.slow
def test_bfloat16_caches_of_a_sequence_fit_those_of_slots():
    """A CPU stores them as integers if there are several sequences (`cache.zeros`)."""
    shapes = (dataclasses.replace(model.config, dtype="bfloat16") for model in (TARGET, DRAFT))
    target, draft = (Llama(shape, rngs=nnx.Rngs(0)) for shape in shapes)
    models = get_method("otm_block", **TREE), target, draft
    expected = generate(KEY, *models, *_padded(PROMPTS), NEW, Policy(eos=7))
    _assert_equal(
        generate_all(KEY, *models, PROMPTS, NEW, Policy(eos=7), slots=4), expected, PROMPTS
    )


SMALL = random_table(0, 5)
TABLE, OTHER = TableModel(SMALL), TableModel(perturbed(SMALL, 1, 0.8))
CHAIN = get_method("speculative", draft_length=2)
MODELS = CHAIN, TABLE, OTHER
SHORT = [[1, 2], [3], [0, 4, 2], [2], [1, 1]]


def _indices(completions):
    return [done.index for done in completions]


def test_sequences_come_in_the_order_of_prompts_if_asked():
    prompts, policy = SHORT * 8, Policy(eos=3)
    arguments = KEY, *MODELS, prompts, NEW, policy
    by_end = list(generate_all(*arguments, slots=4))
    assert _indices(by_end) != sorted(_indices(by_end))
    ordered = list(generate_all(*arguments, slots=4, in_order=True, skip=[0, 5, 39]))
    assert _indices(ordered) == [index for index in range(40) if index not in (0, 5, 39)]
    tokens = {done.index: done.tokens.tolist() for done in by_end}
    assert all(done.tokens.tolist() == tokens[done.index] for done in ordered)


@pytest.mark.slow
def test_programs_run_groups_of_prompts_and_several_calls(monkeypatch):
    """As on accelerators. The last of two groups of three overlaps the first in four slots."""
    expected = generate(KEY, *MODELS, *_padded(SHORT * 3), NEW, Policy(eos=3))
    for group, calls in ((3, 5), (9, 2)):
        monkeypatch.setattr(slots, "GROUP", group)
        monkeypatch.setattr(slots, "CALLS", calls)
        completions = generate_all(KEY, *MODELS, SHORT * 3, NEW, Policy(eos=3), slots=4)
        _assert_equal(completions, expected, SHORT * 3)


@pytest.mark.slow
def test_programs_for_accelerators_give_the_same_sequences(monkeypatch):
    models = get_method("otm_block", **TREE), TARGET, DRAFT
    expected = generate(KEY, *models, *_padded(PROMPTS), NEW, Policy(eos=7))
    monkeypatch.setattr(backend, "on_cpu", lambda: False)
    jax.clear_caches()
    _assert_equal(generate_all(KEY, *models, PROMPTS, NEW, Policy(eos=7)), expected, PROMPTS)


def test_prompts_are_read_when_slots_are_free_and_grow_programs_rarely(count_compilations):
    rng, read = np.random.default_rng(0), []
    prompts = [rng.integers(0, 5, length).tolist() for length in range(1, 34)]

    def one_by_one():
        for prompt in prompts:
            read.append(prompt)
            yield prompt

    finished = []
    with count_compilations() as compiled:
        for done in generate_all(KEY, *MODELS, one_by_one(), NEW, slots=4):
            finished.append(done)
            assert len(read) <= len(finished) + 2 * 4
    _assert_equal(finished, generate(KEY, *MODELS, *_padded(prompts), NEW), prompts)
    lengths = (16, 32, 64)
    assert len(compiled) <= 3 * len(lengths) + 1  # Resize, start, advance; and the keys.


def test_the_host_reads_a_program_while_the_next_one_runs(monkeypatch):
    events = []
    advance, fetch = slots.advance, slots.hosts.fetch

    def recorded(*arguments):
        after, seen = advance(*arguments)
        events.append(("start", seen.done))
        return after, seen

    def fetched(tree):
        leaf = tree if isinstance(tree, jax.Array) else tree.done
        events.append(("read", leaf))
        return fetch(tree)

    monkeypatch.setattr(slots, "advance", recorded)
    monkeypatch.setattr(slots.hosts, "fetch", fetched)
    completions = list(generate_all(KEY, *MODELS, SHORT * 4, NEW, Policy(eos=3), slots=4))
    started = [leaf for kind, leaf in events if kind == "start"]
    for place, (kind, leaf) in enumerate(events):
        if kind == "read":
            number = next(i for i, each in enumerate(started) if each is leaf)
            assert sum(kind == "start" for kind, _ in events[:place]) == number + 2
    reads = len(events) - len(started)
    assert reads <= len(started) + len(completions)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[1], []]}, r"prompts\[1\]: must be a sequence of tokens"),
        ({"prompts": [[1], [5]]}, r"prompts\[1\]: a token is outside 0\.\.4"),
        ({"prompts": [[1], [[1, 2]]]}, r"prompts\[1\]: must be a sequence of tokens"),
        ({"prompts": ["text"]}, r"prompts\[0\]: must be integers"),
        ({"prompts": [[1], [1] * 300]}, r"prompts\[1\] of 300 tokens, max_new_tokens=12: "),
        ({"slots": 0}, "slots=0: must be"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: must be"),
        ({"key": jax.random.split(KEY, 2)}, r"key=key<fry>\[2\]: must be a single typed key"),
        ({"key": 3}, "key=3: must be a single typed key, such as jax.random.key\\(seed\\)$"),
        ({"prompts": 5}, "prompts=5: must be an iterable"),
        ({"prompts": np.array(3)}, r"prompts=array\(3\): must be an iterable"),
        ({"prompts": iter([[1]]), "draft_policy": Policy(np.ones(3))}, "policy: has one value per"),
        ({"policy": Policy(np.ones(3))}, r"temperature: has shape \[3\] for 2 sequences"),
        ({"draft_policy": Policy(-1.0)}, "draft_temperature=-1.0"),
        ({"stop": "end"}, "stop='end': strings need a tokenizer"),
        ({"draft": None}, "method 'speculative': needs a draft model"),
        ({"mesh": jax.make_mesh((1,), ("x",))}, r"mesh: has axes \('x',\)"),
    ],
)
def test_bad_arguments_are_refused_before_the_first_sequence(change, message):
    given = {"key": KEY, "method": CHAIN, "target": TABLE, "draft": OTHER, "max_new_tokens": NEW}
    with pytest.raises(UserError, match=message):
        generate_all(**given | {"prompts": [[1], [2]]} | change)


@pytest.mark.parametrize("error", [UserError("prompts[5]"), OSError("the disk")])
def test_sequences_in_slots_are_finished_before_an_error_of_the_prompts(error):
    def prompts():
        yield from SHORT
        if isinstance(error, UserError):
            yield [99]
        raise error

    finished = []
    with pytest.raises(type(error), match=r"prompts\[5\]|the disk"):
        for done in generate_all(KEY, *MODELS, prompts(), NEW, slots=4):
            finished.append(done)
    assert sorted(_indices(finished)) == list(range(5))


def test_caches_have_one_length_whatever_the_rows_of_a_program(monkeypatch):
    """On accelerators models run on longer pieces of a few prompts than of many."""
    config = dataclasses.replace(CONFIG, context=256)
    models = get_method("baseline"), Llama(config, rngs=nnx.Rngs(0)), None
    prompts = [[1] * 200, [2, 3], [1] * 90, [4]]
    expected = generate(KEY, *models, *_padded(prompts), 4)
    monkeypatch.setattr(running, "piece_length", lambda rows: 48 if rows == 1 else 16)
    _assert_equal(generate_all(KEY, *models, prompts, 4, slots=3), expected, prompts)


def test_policies_are_those_of_the_call():
    temperature = np.zeros(5, np.float32)
    expected = generate(KEY, *MODELS, *_padded(SHORT), NEW, Policy(temperature))
    completions = []
    for done in generate_all(KEY, *MODELS, SHORT, NEW, Policy(temperature), slots=1):
        temperature[:] = 1.5
        completions.append(done)
    _assert_equal(completions, expected, SHORT)


def test_no_prompts_give_no_sequences():
    assert not list(generate_all(KEY, *MODELS, [], NEW))
    assert not list(generate_all(KEY, *MODELS, SHORT, NEW, skip=range(5)))
    assert not list(generate_all(KEY, *MODELS, iter(()), NEW, in_order=True))
