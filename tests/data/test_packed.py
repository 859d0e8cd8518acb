"""A corpus that was packed before trains as the text that it was made from does, and bad ones are refused."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from spectr_jax.data.batches import evaluation_batches, go_to, positions_of, training_batches
from spectr_jax.data.packed import INDEX, open_corpus, pack
from spectr_jax.data.tokenizer import BOS, EOS, train_tokenizer
from spectr_jax.errors import UserError

LENGTH = 48


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = "the a small large model draft target token law plan tree chain of in on emits accepts and or".split()  # noqa: SIM905
    lines = [" ".join(rng.choice(words, rng.integers(3, 40))) + f" {index}." for index in range(300)]
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n".join(lines))
    return folder, lines, train_tokenizer(lines, folder / "tokenizer.model", 320)


@pytest.mark.parametrize("compress", [False, True])
def test_rows_are_the_packed_sentences(corpus, tmp_path, monkeypatch, compress):
    _, lines, tokenizer = corpus
    monkeypatch.setattr("spectr_jax.data.packed.ROWS_A_SHARD", 50)
    index = pack(lines, tokenizer, tmp_path, LENGTH, compress)
    rows = open_corpus(f"packed:{tmp_path}")
    assert len(index["rows"]) > 2 and len(rows) == sum(index["rows"].values()) and rows.length == LENGTH
    (whole,) = evaluation_batches(lines, tokenizer, batch=10_000, length=LENGTH)
    np.testing.assert_array_equal([rows[index] for index in range(len(rows))], whole["targets"])
    assert index["tokens"] == np.sum(whole["segments"] > 0) and index["sentences"] == len(lines)


def test_an_epoch_has_every_row_once_and_goes_on(corpus, tmp_path):
    _, lines, tokenizer = corpus
    pack(lines, tokenizer, tmp_path, LENGTH)
    rows = open_corpus(f"packed:{tmp_path}")
    options = {"batch": 4, "length": LENGTH, "seed": 1, "streams": 2}
    iterator = iter(training_batches(rows, tokenizer, **options))
    epoch = len(rows) // 4
    first = [next(iterator) for _ in range(epoch)]
    seen = {tuple(row) for batch in first for row in batch["targets"].tolist()}
    assert len(seen) == 4 * epoch and seen <= {tuple(rows[index].tolist()) for index in range(len(rows))}
    place = json.loads(json.dumps(positions_of(iterator)))
    following = next(iterator)
    iterator.close()
    again = iter(training_batches(rows, tokenizer, **options))
    go_to(again, place)
    for name, array in next(again).items():
        np.testing.assert_array_equal(array, following[name])
    again.close()


def test_where_sentences_begin_follows_from_the_tokens(corpus):
    """Against the sentences themselves, those that are cut among them."""
    _, lines, tokenizer = corpus
    (batch,) = evaluation_batches(lines, tokenizer, batch=10_000, length=LENGTH)
    expected = sorted(tuple([*tokenizer.encode(line), EOS][:LENGTH]) for line in lines)
    assert any(EOS not in sentence for sentence in expected)
    found = []
    for row, number in itertools.product(range(len(batch["targets"])), range(1, 20)):
        inside = batch["segments"][row] == number
        if not inside.any():
            continue
        targets, inputs, positions = (batch[name][row][inside].tolist() for name in ("targets", "inputs", "positions"))
        assert inputs == [BOS, *targets[:-1]] and positions == list(range(len(targets)))
        found.append(tuple(targets))
    assert sorted(found) == expected


def test_the_entry_point_packs(corpus, tmp_path):
    folder, lines, _ = corpus
    command = [sys.executable, "-m", "spectr_jax.pack", f"--data={folder}/train.txt", f"--out={tmp_path}/packed"]
    command += ["--vocab_size=320", f"--length={LENGTH}", "--compress"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "packing 300 sentences" in done.stdout and "% filled" in done.stdout
    assert json.loads((tmp_path / "packed" / INDEX).read_text())["sentences"] == len(lines)
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2 and "holds a packed corpus already" in again.stderr


def test_damaged_corpora_are_refused(corpus, tmp_path):
    _, lines, tokenizer = corpus
    with pytest.raises(UserError, match=r"not a packed corpus that can be read.*spectr_jax\.pack"):
        open_corpus(f"packed:{tmp_path}")
    for compress, name in ((False, "train-00000.npy"), (True, "train-00000.npy.xz")):
        pack(lines, tokenizer, tmp_path, LENGTH, compress)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-200])
        with pytest.raises(UserError, match="not a packed corpus that can be read"):
            open_corpus(f"packed:{tmp_path}")
        (tmp_path / name).unlink()
        with pytest.raises(UserError, match="No such file"):
            open_corpus(f"packed:{tmp_path}")
