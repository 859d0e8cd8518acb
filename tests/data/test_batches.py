"""Tests the rows of packed sentences, and which of them the batch of a step has."""

import contextlib

import jax
import numpy as np
import pytest

from spectr_jax.data.batches import batch_of, read_ahead, shuffled, training_batches
from spectr_jax.data.packed import PackedRows
from spectr_jax.data.packing import PACKING_BINS, first_fit, pack_rows
from spectr_jax.data.tokenizer import BOS, EOS, Tokenizer, train_tokenizer
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest

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
    batch = batch_of(pack_rows(sentences[:5], tokenizer, 64))
    for inputs, targets in _sentences_of(batch):
        assert inputs[0] == BOS and targets[-1] == EOS
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
    padding = batch["segments"] == 0
    assert (
        padding.any() and not batch["inputs"][padding].any() and not batch["targets"][padding].any()
    )


def test_rows_have_every_sentence_once_and_cut_long_ones(sentences, tokenizer):
    """The starts of sentences are recovered from the tokens, also without EOS."""
    long = " ".join(sentences[:20])
    batch = batch_of(pack_rows([*sentences, long], tokenizer, 96))
    found = sorted(tuple(targets.tolist()) for _, targets in _sentences_of(batch))
    whole = [(*tokenizer.encode(sentence), EOS) for sentence in sentences]
    assert found == sorted([*whole, tuple(tokenizer.encode(long)[:96])])
    assert np.mean(batch["segments"][:-20] > 0) > 0.85


def test_first_fit_gives_the_rows_of_grains_packing():
    """Held-out scores of published models depend on these rows. The digest is of the rows that
    Grain's `FirstFitPackIterDataset` makes with 64 bins."""
    sizes = [pow(3, number, 257) % 48 + 1 for number in range(400)]
    places, count = first_fit(sizes, 48)
    rows = np.zeros((count, 48), np.uint16)
    for number, ((row, start), size) in enumerate(zip(places, sizes, strict=True), 1):
        rows[row, start : start + size] = number
    assert places[3:6] == [(0, 16), (1, 0), (0, 44)] and count == 215 > 3 * PACKING_BINS
    assert digest(rows.tobytes())[:16] == "ec9c5ebad0df6baf"


@pytest.mark.parametrize("count", [1, 7, 300])
def test_an_epoch_has_every_row_once_in_a_new_order(count):
    """Epochs end inside batches."""
    size = 8
    read = np.concatenate(
        [shuffled(count, (3,), np.arange(at, at + size)) for at in range(0, 3 * count, size)]
    )
    epochs = read[: 3 * count].reshape(3, count)
    np.testing.assert_array_equal(np.sort(epochs), np.tile(np.arange(count), (3, 1)))
    other = shuffled(count, (4,), np.arange(count))
    if count > 1:
        orders = {tuple(order) for order in (*epochs.tolist(), other.tolist(), range(count))}
        assert len(orders) == 5


def _rows(count, first=0):
    """Returns rows of two shards. Row i has the token `first` + i + 3, twice, and padding."""
    rows = np.repeat(np.arange(first, first + count, dtype=np.uint16)[:, None] + 3, 3, axis=1)
    rows[:, 2] = 0
    return PackedRows(np.split(rows, [count // 3]), "")


def test_batches_mix_sources_and_do_not_depend_on_the_number_of_processes():
    """Each process reads only its rows, those of one source at once."""
    sources = [(_rows(50), 6), (_rows(30, first=100), 2)]
    batches = training_batches(sources, batch_of, seed=1)
    whole = [batches(step, slice(None)) for step in range(20)]
    for step, batch in enumerate(whole):
        assert ((batch["targets"][:, 0] >= 103) == ([False] * 6 + [True] * 2)).all()
        halves = [batches(step, slice(at, at + 4)) for at in (0, 4)]
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), array)
    taken = np.concatenate([batch["targets"][:6, 0] for batch in whole])
    assert sorted(taken[:50]) == list(range(3, 53)) and taken[:50].tolist() != list(range(3, 53))


def test_rows_of_a_batch_are_read_together(monkeypatch):
    """Reading row by row would take as long as a training step of a small model."""
    counts, take = [], PackedRows.take
    monkeypatch.setattr(
        PackedRows, "take", lambda rows, at: (counts.append(len(at)), take(rows, at))[1]
    )
    training_batches([(_rows(50), 24)], batch_of, seed=1)(0, slice(6, 18))
    assert counts == [12]


def test_batches_that_are_read_ahead_start_at_any_step():
    batches = training_batches([(_rows(50), 6)], batch_of, seed=1)
    for first in (0, 7, 20):
        with contextlib.closing(read_ahead(batches, slice(2, 4), first, 20)) as upcoming:
            found = list(upcoming)
        assert len(found) == 20 - first
        for step, batch in enumerate(found, first):
            jax.tree.map(np.testing.assert_array_equal, batch, batches(step, slice(2, 4)))


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
