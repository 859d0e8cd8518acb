"""Tests the content, order and positions of batches of packed sentences."""

import collections
import itertools
import json

import numpy as np
import pytest

from spectr_jax.data.batches import evaluation_batches, go_to, positions_of, training_batches
from spectr_jax.data.packing import encode
from spectr_jax.data.tokenizer import BOS, EOS, Tokenizer, train_tokenizer
from spectr_jax.utils.errors import UserError

WORDS = "the a small large model draft target token law plan tree chain of in on emits accepts and or".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def sentences():
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(3, 12))) + f" {index}." for index in range(400)]


@pytest.fixture(scope="module")
def tokenizer(sentences, tmp_path_factory):
    return train_tokenizer(sentences, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", 320)


def _sentences_of(batch):
    """Yields (inputs, targets) of each packed sentence."""
    for row in range(len(batch["inputs"])):
        for segment in range(1, batch["segments"][row].max() + 1):
            inside = batch["segments"][row] == segment
            np.testing.assert_array_equal(batch["positions"][row][inside], np.arange(inside.sum()))
            yield batch["inputs"][row][inside], batch["targets"][row][inside]


def test_any_string_can_be_encoded_and_decoded(tokenizer):
    for text in ("the draft", "naïve 東京 🙂 zq"):
        # -1 is not a token; outputs contain -1 where the target had no distribution.
        assert tokenizer.decode([*tokenizer.encode(text), -1]) == text
    assert tokenizer.piece(-1) == "<none>"
    assert tokenizer.vocab_size == 320


def test_targets_are_inputs_shifted_by_one_token(sentences, tokenizer):
    (batch,) = evaluation_batches(sentences[:5], tokenizer, batch_size=4, length=64)
    for inputs, targets in _sentences_of(batch):
        assert inputs[0] == BOS and targets[-1] == EOS
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
    padding = batch["segments"] == 0
    assert (
        padding.any() and not batch["inputs"][padding].any() and not batch["targets"][padding].any()
    )


def test_long_sentences_are_truncated(tokenizer):
    pieces = tokenizer.encode("the draft")
    np.testing.assert_array_equal(encode("the draft", tokenizer, 64), [*pieces, EOS])
    np.testing.assert_array_equal(encode("the draft", tokenizer, len(pieces)), pieces)


def test_evaluation_sees_every_sentence_once(sentences, tokenizer):
    batches = list(evaluation_batches(sentences, tokenizer, batch_size=4, length=96))
    found = sorted(
        tokenizer.decode(targets) for batch in batches for _, targets in _sentences_of(batch)
    )
    assert found == sorted(sentences)
    for batch in batches:
        assert not batch["targets"][batch["segments"] == 0].any()
    filled = np.mean([np.mean(batch["segments"] > 0) for batch in batches[:-1]])
    assert filled > 0.85


@pytest.mark.parametrize("streams", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_an_epoch_has_every_sentence_once(sentences, tokenizer, streams):
    """Each time a stream has used all its packed rows, each of its sentences has occurred n or
    n + 1 times. The order of each epoch is new. The test restarts the pipeline every 17 batches."""
    numbers = {
        tokenizer.decode(tokenizer.encode(sentence)): index
        for index, sentence in enumerate(sentences)
    }
    # A batch has one row from each stream.
    options = {"batch_size": streams, "length": 96, "seed": 3, "streams": streams}
    seen: list[list[int]] = [[] for _ in range(streams)]
    whole: list[list[int]] = [[] for _ in range(streams)]
    iterator = iter(training_batches(sentences, tokenizer, **options))
    for step in range(400 if streams == 1 else 200):
        batch = next(iterator)
        positions = json.loads(json.dumps(positions_of(iterator)))
        for stream, position in enumerate(positions):
            row = {name: array[stream : stream + 1] for name, array in batch.items()}
            seen[stream] += [
                numbers[tokenizer.decode(targets)] for _, targets in _sentences_of(row)
            ]
            if position["next_row"] == 0:
                assert len(seen[stream]) == position["parent"]["next_index"]
                whole[stream] = list(seen[stream])
        if step % 17 == 0:
            iterator = iter(training_batches(sentences, tokenizer, **options))
            go_to(iterator, positions)
    shares = []
    for found in whole:
        times = collections.Counter(found)
        assert min(times.values()) >= 2 and max(times.values()) - min(times.values()) <= 1
        shares += list(times)
    assert sorted(shares) == list(range(len(sentences)))
    half = len(sentences) // streams
    assert whole[0][:half] != whole[0][half : 2 * half]


def test_batches_do_not_depend_on_the_number_of_processes(sentences, tokenizer):
    options = {"batch_size": 8, "length": 96, "seed": 3, "streams": 4}
    whole = training_batches(sentences, tokenizer, **options)
    halves = [
        training_batches(sentences, tokenizer, **options, mine=mine)
        for mine in (slice(0, 2), slice(2, 4))
    ]
    for expected, *parts in itertools.islice(zip(whole, *halves, strict=False), 20):
        for name, array in expected.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_the_seed_determines_the_order_of_sentences(sentences, tokenizer):
    def first(seed):
        return next(
            iter(training_batches(sentences, tokenizer, batch_size=2, length=96, seed=seed))
        )["inputs"]

    np.testing.assert_array_equal(first(0), first(0))
    assert (first(0) != first(1)).any()


def test_batches_continue_from_a_restored_position(sentences, tokenizer):
    def start():
        return iter(training_batches(sentences, tokenizer, batch_size=3, length=96, seed=0))

    whole = list(itertools.islice(start(), 60))  # More than one epoch.
    for taken in (0, 7, 40):
        first = start()
        for _ in range(taken):
            next(first)
        second = start()
        go_to(second, positions_of(first))
        for expected in whole[taken : taken + 15]:
            batch = next(second)
            for name, array in expected.items():
                np.testing.assert_array_equal(batch[name], array)


def test_too_little_text_for_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(UserError, match="no vocabulary of 5000 pieces can be trained"):
        train_tokenizer(["one short line"], tmp_path / "tokenizer.model", 5000)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [None, b"", b"not a model"])
def test_missing_or_invalid_tokenizer_files_are_refused(tmp_path, content):
    path = tmp_path / "tokenizer.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer.model' is not a SentencePiece model"):
        Tokenizer(path)
