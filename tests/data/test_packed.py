"""Tests that a packed corpus has the rows of its text, and that damaged ones are refused."""

import json
import subprocess
import sys
import types

import numpy as np
import pytest

from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.packed import open_packed
from spectr_jax.data.packing import INDEX, STARTED, pack, pack_rows
from spectr_jax.data.tokenizer import EOS, PAD, train_tokenizer
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
def test_a_packed_corpus_has_the_rows_of_its_sentences(corpus, tmp_path, monkeypatch, compress):
    _, lines, tokenizer = corpus
    monkeypatch.setattr("spectr_jax.data.packing.SENTENCES_A_SHARD", 140)
    index = pack(lines, tokenizer, tmp_path, LENGTH, compress)
    rows = open_packed(tmp_path)
    assert len(index["rows"]) == 3 and len(rows) == sum(index["rows"].values())
    assert rows.length == LENGTH and index["sentences"] == len(lines)
    parts = [lines[first : first + 140] for first in range(0, len(lines), 140)]
    wanted = np.concatenate([pack_rows(part, tokenizer, LENGTH) for part in parts])
    np.testing.assert_array_equal([rows[index] for index in range(len(rows))], wanted)
    assert index["tokens"] == np.sum(wanted != PAD)


def test_vocabularies_of_more_than_16_bits_are_packed(tmp_path):
    tokenizer = types.SimpleNamespace(
        encode=lambda text: [70_000], vocab_size=70_001, proto=b"large"
    )
    pack(["a", "b"], tokenizer, tmp_path, 4)
    assert open_packed(tmp_path)[0].tolist() == [70_000, EOS, 70_000, EOS]


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

    def counted(sentences, **options):
        calls.extend([sentences] if sentences else [])  # Without sentences: the form of rows.
        if len(calls) == 3 and sentences:
            raise KeyboardInterrupt
        return pack_rows(sentences, **options)

    monkeypatch.setattr("spectr_jax.data.packing.pack_rows", counted)
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
    np.save(shard, np.full((3, LENGTH + 1), 7, np.uint16))
    assert pack(lines, tokenizer, tmp_path / "out", LENGTH) == wanted and len(calls) == 3 + 5
    open_packed(tmp_path / "out")
    with pytest.raises(UserError, match="other text or settings"):
        pack(lines[::-1], tokenizer, tmp_path / "out", LENGTH)
    (tmp_path / "out" / INDEX).unlink()  # Now nothing says of which text the shards are.
    again = pack(lines[::-1], tokenizer, tmp_path / "out", LENGTH)
    assert len(calls) == 3 + 5 + len(again["rows"])


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
        open_packed(tmp_path)
    for compress, name in ((False, "part-00000.npy"), (True, "part-00000.npy.xz")):
        folder = tmp_path / str(compress)
        index = pack(lines, tokenizer, folder, LENGTH, compress)
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-200])
        with pytest.raises(UserError, match="not a packed corpus that can be read"):
            open_packed(folder)
        (folder / name).unlink()
        with pytest.raises(UserError, match="No such file"):
            open_packed(folder)
    for rows in ({}, []):
        (folder / INDEX).write_text(json.dumps({**index, "rows": rows}))
        with pytest.raises(UserError, match="not a packed corpus that can be read"):
            open_packed(folder)
