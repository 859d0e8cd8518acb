"""Tests the table of next tokens that `spectr_jax.tabulate` makes."""

import itertools

import numpy as np
import pytest

from spectr_jax.distillation import bigrams, labels
from spectr_jax.distillation import teacher as teaching
from spectr_jax.utils.errors import UserError

from .conftest import LENGTH, about
from .test_labels import log_probabilities, sequences

OPTIONS = {"count": 30, "length": LENGTH, "temperature": 1.0, "seed": 0}
RANKS = 3


@pytest.fixture
def corpus(sentences, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(sentences[:30]) + "\n")
    return str(path)


def tabulated(source, teacher, **more):
    """Returns the model, its number of tokens, and the rows that it was made from."""
    rows = list(bigrams.rows_of_source(source, teacher, **OPTIONS | more))
    model = bigrams.tabulated(bigrams.labelled(rows, teacher), teacher.model.vocab_size, 64, RANKS)
    return *model, rows


@pytest.mark.slow
def test_the_table_holds_the_mean_of_the_target(teacher, corpus):
    """Each token's `RANKS` likeliest next tokens count at each place, and all once everywhere."""
    model, count, rows = tabulated(corpus, teacher)
    V = teacher.model.vocab_size
    mass, places = np.zeros((V, V)), np.zeros(V)
    for tokens, *_ in sequences(itertools.chain(*rows)):
        pmf = np.exp(log_probabilities(teacher.model, tokens))
        for token, row in zip(tokens, pmf, strict=True):
            best = np.argsort(-row)[:RANKS]
            mass[token, best] += row[best]
            places[token] += 1
    overall = mass.sum(0) + 1 / V
    overall /= overall.sum()
    frequent = np.argsort(-overall)[:RANKS]
    mass[:, frequent] += overall[frequent]
    assert count == places.sum() > 100
    found, log_probs = np.asarray(model.tokens[...]), np.asarray(model.log_probs[...])
    for token in range(V):
        best = -np.sort(-mass[token])[:RANKS]
        np.testing.assert_allclose(mass[token, found[token]], best, rtol=5e-3)
        probs = np.exp(log_probs[token]) * (places[token] + 1)
        np.testing.assert_allclose(probs, best, rtol=5e-3)


def test_rows_that_label_wrote_give_the_same_table(teacher, sentences, corpus, tmp_path):
    folder = tmp_path / "rows"
    labels.claim_folder(folder, about(teacher, labelled=False))
    row_type = labels.row_type(teacher.model.vocab_size, LENGTH, labelled=False)
    texts = teaching.read_texts(sentences, teacher.tokenizer)
    teaching.write_labels(folder, texts, 30, lambda rows: None, row_type, 30)
    tables = [tabulated(source, teacher) for source in (corpus, str(folder))]
    assert tables[0][1] == tables[1][1]
    np.testing.assert_array_equal(*(model.tokens[...] for model, *_ in tables))


def test_the_target_writes_chats_if_there_is_no_text(teacher):
    model, count, rows = tabulated("", teacher, length=42)
    opening, _ = teaching.chat_frame(teacher.tokenizer)
    starts = [tokens[: len(opening)] for tokens, *_ in sequences(itertools.chain(*rows))]
    assert starts == [opening] * len(starts) and count > len(starts) > 20
    assert len({tuple(row) for row in np.asarray(model.tokens[...]).tolist()}) > 1


def test_rows_of_another_vocabulary_are_refused(teacher, tmp_path):
    folder = tmp_path / "rows"
    labels.claim_folder(folder, about(teacher, vocabulary="another", labelled=False))
    row_type = labels.row_type(teacher.model.vocab_size, LENGTH, labelled=False)
    texts = teaching.read_texts(["draft target"] * 8, teacher.tokenizer)
    teaching.write_labels(folder, texts, 8, lambda rows: None, row_type, 8)
    with pytest.raises(UserError, match="has another vocabulary than 'teacher'"):
        bigrams.rows_of_source(str(folder), teacher, **OPTIONS)


def test_a_temperature_of_zero_writes_no_chats(teacher):
    with pytest.raises(UserError, match="temperature=0: writes the same chat"):
        bigrams.rows_of_source("", teacher, **OPTIONS | {"length": 42, "temperature": 0.0})
