"""Tests that a packed corpus gives the batches of its text, and that damaged ones are refused."""

import contextlib
import itertools
import json
import subprocess
import sys

import grain
import numpy as np
import pytest

from spectr_jax.data.batches import evaluation_batches, go_to, positions_of, training_batches
from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.packed import PackedRows, ShuffledRows, open_corpus
from spectr_jax.data.packing import INDEX, PACKING_BINS, STARTED, first_fit, pack
from spectr_jax.data.tokenizer import BOS, EOS, PAD, train_tokenizer
from spectr_jax.utils.errors import UserError

LENGTH = 48


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = "the a small large model draft target token law plan tree chain of in on emits accepts and or".split()  # noqa: SIM905
    lines = [
        " ".join(rng.choice(words, rng.integers(3, 40))) + f" {index}." for index in range(300)
    ]
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n".join(lines))
    return folder, lines, train_tokenizer(lines, folder / "tokenizer.model", 320)


@pytest.mark.parametrize("compress", [False, True])
def test_packed_rows_equal_the_batches_of_the_sentences(corpus, tmp_path, monkeypatch, compress):
    _, lines, tokenizer = corpus
    monkeypatch.setattr("spectr_jax.data.packing.SENTENCES_A_SHARD", 140)
    index = pack(lines, tokenizer, tmp_path, LENGTH, compress)
    rows = open_corpus(f"packed:{tmp_path}")
    assert len(index["rows"]) == 3 and len(rows) == sum(index["rows"].values())
    assert rows.length == LENGTH and index["sentences"] == len(lines)
    taken = []
    for first in range(0, len(lines), 140):  # 140 sentences fill the bins more than once.
        part = lines[first : first + 140]
        (whole,) = evaluation_batches(part, tokenizer, batch_size=10_000, length=LENGTH)
        taken.append(whole["targets"])
    np.testing.assert_array_equal(
        [rows[index] for index in range(len(rows))], np.concatenate(taken)
    )
    assert len(taken[0]) > PACKING_BINS and index["tokens"] == np.sum(np.concatenate(taken) != PAD)


def test_two_processes_pack_tfds_as_one_packs_text(corpus, tmp_path, monkeypatch, array_records):
    folder, lines, tokenizer = corpus
    monkeypatch.setattr("spectr_jax.data.packing.SENTENCES_A_SHARD", 70)
    monkeypatch.setattr("spectr_jax.data.corpus.READ_TOGETHER", 32)
    array_records(tmp_path / "tfds", lines, shards=2)
    tfds = open_sentences("tfds:lm1b:train", str(tmp_path / "tfds"))
    text = open_sentences(str(folder / "train.txt"))
    one = pack(text, tokenizer, tmp_path / "one", LENGTH)
    two = pack(tfds, tokenizer, tmp_path / "two", LENGTH, processes=2)
    one.pop("content"), two.pop("content")  # Of the text, and of the files of TFDS.
    assert one == two and len(one["rows"]) == 5
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == sorted(
        [*one["rows"], INDEX, "tokenizer.model"]
    )
    for name in one["rows"]:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_stopped_pack_resumes_and_a_damaged_shard_is_packed_again(corpus, tmp_path, monkeypatch):
    _, lines, tokenizer = corpus
    monkeypatch.setattr("spectr_jax.data.packing.SENTENCES_A_SHARD", 70)
    wanted, calls = pack(lines, tokenizer, tmp_path / "whole", LENGTH), []

    def counted(*args):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return first_fit(*args)

    monkeypatch.setattr("spectr_jax.data.packing.first_fit", counted)
    with pytest.raises(KeyboardInterrupt):
        pack(lines, tokenizer, tmp_path / "out", LENGTH)
    assert (tmp_path / "out" / STARTED).exists() and not (tmp_path / "out" / INDEX).exists()
    with pytest.raises(UserError, match="length=48, not 32"):
        pack(lines, tokenizer, tmp_path / "out", 32)
    assert pack(lines, tokenizer, tmp_path / "out", LENGTH) == wanted and len(calls) == 3 + 3
    assert pack(lines, tokenizer, tmp_path / "out", LENGTH) == wanted and len(calls) == 3 + 3
    shard = tmp_path / "out" / "part-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-200])
    assert pack(lines, tokenizer, tmp_path / "out", LENGTH) == wanted and len(calls) == 3 + 4
    open_corpus(f"packed:{tmp_path / 'out'}")
    with pytest.raises(UserError, match="other text or settings"):
        pack(lines[::-1], tokenizer, tmp_path / "out", LENGTH)
    (tmp_path / "out" / INDEX).unlink()  # Now nothing says of which text the shards are.
    again = pack(lines[::-1], tokenizer, tmp_path / "out", LENGTH)
    assert len(calls) == 3 + 4 + len(again["rows"])


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_an_epoch_has_every_row_once_in_a_new_order(corpus, tmp_path, monkeypatch, streams):
    """Checks each stream. Its epochs end inside batches."""
    _, lines, tokenizer = corpus
    monkeypatch.setattr("spectr_jax.data.packing.SENTENCES_A_SHARD", 40)
    pack(lines, tokenizer, tmp_path, LENGTH)
    rows = open_corpus(f"packed:{tmp_path}")
    options = {"batch_size": 11 * streams, "length": LENGTH, "seed": 1, "streams": streams}
    with contextlib.closing(iter(training_batches(rows, tokenizer, **options))) as iterator:
        taken = np.stack(
            [next(iterator)["targets"] for _ in range(2 * len(rows) // (11 * streams) + 1)]
        )
    for stream in range(streams):
        mine = taken[:, 11 * stream :][:, :11].reshape(-1, LENGTH).tolist()
        wanted = [rows[index].tolist() for index in range(stream, len(rows), streams)]
        first, second = mine[: len(wanted)], mine[len(wanted) :][: len(wanted)]
        assert len(wanted) % 11 and sorted(first) == sorted(second) == sorted(wanted)
        assert first != second and first != wanted


def test_positions_do_not_depend_on_the_number_of_processes(corpus, tmp_path):
    """Two processes save their positions in the second epoch, and one process restores them."""
    _, lines, tokenizer = corpus
    pack(lines, tokenizer, tmp_path, LENGTH)
    rows = open_corpus(f"packed:{tmp_path}")
    options = {"batch_size": 12, "length": LENGTH, "seed": 1, "streams": 4}
    taken = len(rows) // 12 + 2
    places, following = [], []
    for mine in (slice(0, 2), slice(2, 4)):
        with contextlib.closing(
            iter(training_batches(rows, tokenizer, **options, mine=mine))
        ) as half:
            for _ in range(taken):
                next(half)
            places += json.loads(json.dumps(positions_of(half)))
            following.append(next(half))
    with contextlib.closing(iter(training_batches(rows, tokenizer, **options))) as whole:
        go_to(whole, places)
        for name, array in next(whole).items():
            np.testing.assert_array_equal(
                array, np.concatenate([batch[name] for batch in following])
            )


def test_all_rows_of_a_batch_are_read_together(corpus, tmp_path, monkeypatch):
    """One call reads a stream's share of the batch. Reading row by row would take as long as a
    training step of a small model."""
    _, lines, tokenizer = corpus
    pack(lines, tokenizer, tmp_path, LENGTH)
    counts = []
    take = PackedRows.take
    monkeypatch.setattr(
        PackedRows,
        "take",
        lambda rows, indices: (counts.append(len(indices)), take(rows, indices))[1],
    )
    monkeypatch.setattr(PackedRows, "__getitem__", None)
    options = {"batch_size": 24, "length": LENGTH, "seed": 1, "streams": 4}
    with contextlib.closing(
        iter(training_batches(open_corpus(f"packed:{tmp_path}"), tokenizer, **options))
    ) as iterator:
        next(iterator)
    assert set(counts) == {6}


def test_rows_have_the_order_of_grains_shuffle(corpus, tmp_path):
    """Positions, which count rows, stay valid for runs that used Grain's own shuffle."""
    _, lines, tokenizer = corpus
    pack(lines, tokenizer, tmp_path, LENGTH)
    rows = open_corpus(f"packed:{tmp_path}")
    slow = iter(
        grain.MapDataset.source(rows)[1::2]
        .seed(5 + 1)
        .shuffle()
        .repeat()
        .to_iter_dataset()
        .batch(9)
    )
    fast = iter(ShuffledRows(rows, count=9, seed=5, stream=1, streams=2))
    for _ in range(2 * len(rows) // 9):
        np.testing.assert_array_equal(next(fast), next(slow))
        assert fast.get_state() == slow.get_state()
    slow.close()


def test_sentence_starts_are_recovered_from_the_tokens(corpus):
    """Compares with the sentences themselves, some of which are truncated."""
    _, lines, tokenizer = corpus
    (batch,) = evaluation_batches(lines, tokenizer, batch_size=10_000, length=LENGTH)
    expected = sorted(tuple([*tokenizer.encode(line), EOS][:LENGTH]) for line in lines)
    assert any(EOS not in sentence for sentence in expected)
    found = []
    for row, number in itertools.product(range(len(batch["targets"])), range(1, 20)):
        inside = batch["segments"][row] == number
        if not inside.any():
            continue
        targets, inputs, positions = (
            batch[name][row][inside].tolist() for name in ("targets", "inputs", "positions")
        )
        assert inputs == [BOS, *targets[:-1]] and positions == list(range(len(targets)))
        found.append(tuple(targets))
    assert sorted(found) == expected


def test_the_pack_command_writes_a_corpus_only_once(corpus, tmp_path):
    folder, lines, _ = corpus
    command = [
        sys.executable,
        "-m",
        "spectr_jax.pack",
        f"--data={folder}/train.txt",
        f"--out={tmp_path}/packed",
    ]
    command += ["--vocab_size=320", f"--length={LENGTH}", "--compress"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "packing 300 sentences" in done.stdout and "% filled" in done.stdout
    assert json.loads((tmp_path / "packed" / INDEX).read_text())["sentences"] == len(lines)
    again = subprocess.run(command, capture_output=True, text=True)
    assert (again.returncode, again.stderr) == (0, "") and "already" in again.stdout
    other = subprocess.run([*command, "--vocab_size=330"], capture_output=True, text=True)
    assert other.returncode == 2 and "has 320 pieces" in other.stderr


def test_missing_or_damaged_corpora_are_refused(corpus, tmp_path):
    _, lines, tokenizer = corpus
    with pytest.raises(UserError, match=r"not a packed corpus that can be read.*spectr_jax\.pack"):
        open_corpus(f"packed:{tmp_path}")
    for compress, name in ((False, "part-00000.npy"), (True, "part-00000.npy.xz")):
        folder = tmp_path / str(compress)
        pack(lines, tokenizer, folder, LENGTH, compress)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-200])
        with pytest.raises(UserError, match="not a packed corpus that can be read"):
            open_corpus(f"packed:{folder}")
        (folder / name).unlink()
        with pytest.raises(UserError, match="No such file"):
            open_corpus(f"packed:{folder}")
