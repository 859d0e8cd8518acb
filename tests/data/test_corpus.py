"""Tests sources of sentences: text files, archives and TFDS, and damaged files."""

import gzip
import lzma
import sys

import pytest

from spectr_jax.data.corpus import content_digest, corpus_digest, open_sentences, sample_sentences
from spectr_jax.utils.errors import UserError

LINES = ["A first line.", "Zwei Wörter", "three"]


def _write(path, lines, opener=open):
    with opener(path, "wb") as file:
        file.write("\n".join(lines).encode())
    return str(path)


@pytest.mark.parametrize(
    ("suffix", "opener"), [(".txt", open), (".gz", gzip.open), (".xz", lzma.open), ("", open)]
)
def test_each_line_of_a_file_is_a_sentence(tmp_path, suffix, opener):
    sentences = open_sentences(_write(tmp_path / f"corpus{suffix}", LINES, opener))
    assert [sentences[index] for index in range(len(sentences))] == LINES


def test_folders_and_globs_join_files_in_order(tmp_path):
    _write(tmp_path / "b.txt", [*LINES[1:], ""])
    _write(tmp_path / "a.txt.xz", LINES[:1], lzma.open)
    for spec in (str(tmp_path), str(tmp_path / "*")):
        sentences = open_sentences(spec)
        assert [sentences[index] for index in range(len(sentences))] == LINES
    assert len(open_sentences(str(tmp_path / "b*"))) == 2


@pytest.mark.parametrize(
    ("suffix", "opener"), [(".txt", open), (".gz", gzip.open), (".xz", lzma.open)]
)
def test_blank_lines_and_carriage_returns_are_dropped(tmp_path, suffix, opener):
    folder = tmp_path / "folder"
    folder.mkdir()
    texts = (
        "\r\n \t \r\n" + LINES[0] + "\r\n\r\n",
        "   \n\n  " + LINES[1] + " \n \n\r\n" + LINES[2] + "\r",
        " ",
        "\r\n",
    )
    for index, text in enumerate(texts):
        with opener(folder / f"{index}{suffix}", "wb") as file:
            file.write(text.encode())
    sentences = open_sentences(str(folder))
    assert [sentences[index] for index in range(len(sentences))] == [
        LINES[0],
        f"  {LINES[1]} ",
        LINES[2],
    ]
    with pytest.raises(UserError, match="is empty; give text"):
        open_sentences(str(folder / f"2{suffix}"))


@pytest.mark.parametrize(
    ("suffix", "opener"), [(".txt", open), (".gz", gzip.open), (".xz", lzma.open)]
)
def test_only_newlines_end_a_line_and_byte_order_marks_are_dropped(tmp_path, suffix, opener):
    odd = "form\x0cfeed \x0b \x85 \u2028"
    for name in "ab":
        with opener(tmp_path / f"{name}{suffix}", "wb") as file:
            file.write(f"\ufeff{name}\r\n{odd}\n".encode())
    assert list(open_sentences(str(tmp_path))) == ["a", odd, "b", odd]


def test_samples_are_seeded_and_without_repeats(tmp_path):
    sentences = open_sentences(_write(tmp_path / "c.txt", [f"line {index}" for index in range(50)]))
    drawn = list(sample_sentences(sentences, 20, seed=1))
    assert len(set(drawn)) == 20 and drawn == list(sample_sentences(sentences, 20, seed=1))
    assert drawn != list(sample_sentences(sentences, 20, seed=2))
    assert len(list(sample_sentences(sentences, 99, seed=1))) == 50


def test_corpus_digests_depend_only_on_the_text(tmp_path):
    sentences = [f"sentence {number}" for number in range(2_000)]
    texts = {
        "one": sentences,
        "same": sentences,
        "longer": [*sentences, "more"],
        "upper": [text.upper() for text in sentences],
    }
    for name, lines in texts.items():
        (tmp_path / name).write_text("\n".join(lines))
    found = {name: corpus_digest(open_sentences(str(tmp_path / name))) for name in texts}
    assert found["one"] == found["same"] and len(set(found.values())) == 3
    assert corpus_digest(["alone"]) != corpus_digest(["other"])


def test_content_digests_see_every_sentence(tmp_path, array_records):
    sentences = [f"sentence {number}" for number in range(2_000)]
    edited = [*sentences[:5], "edited", *sentences[6:]]
    for name, lines in (("one", sentences), ("two", sentences), ("edited", edited)):
        _write(tmp_path / name, lines)
        array_records(tmp_path / f"tfds_{name}", lines)
    texts = [content_digest(open_sentences(str(tmp_path / name))) for name in ("one", "two")]
    assert texts[0] == texts[1] != content_digest(open_sentences(str(tmp_path / "edited")))
    records = [
        content_digest(open_sentences("tfds:lm1b:train", str(tmp_path / f"tfds_{name}")))
        for name in ("one", "two", "edited")
    ]
    assert records[0] == records[1] != records[2]
    assert content_digest(sentences) != content_digest(edited)


def test_a_tfds_corpus_without_text_is_refused(tmp_path, array_records):
    array_records(tmp_path, LINES)
    place = (tmp_path / "lm1b").rename(tmp_path / "mine") / "1.1.0"
    for file in place.iterdir():
        if file.suffix == ".json":
            text = file.read_text().replace('"text": {', '"line": {', 1).replace("lm1b", "mine")
            file.write_text(text)
        else:
            file.rename(place / file.name.replace("lm1b", "mine"))
    with pytest.raises(UserError, match=r"'tfds:mine:train' has no feature 'text', only line"):
        open_sentences("tfds:mine:train", str(tmp_path))


def test_tfds_lm1b_is_read_without_tensorflow(tmp_path, array_records):
    """Array records of lm1b's layout are found through TFDS's own lm1b builder."""
    array_records(tmp_path, LINES, ["held out"])
    sentences = open_sentences("tfds:lm1b:train", str(tmp_path))
    assert [sentences[index] for index in range(len(sentences))] == LINES
    assert open_sentences("tfds:lm1b:test", str(tmp_path))[0] == "held out"
    assert "tensorflow" not in sys.modules


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"the corpus '.*empty.txt' is empty; give text"):
        open_sentences(_write(tmp_path / "empty.txt", []))


def test_patterns_that_match_no_file_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no text file matches '.*none-\*.txt'; give a file"):
        open_sentences(str(tmp_path / "none-*.txt"))


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
@pytest.mark.parametrize("damage", ["truncated", "not an archive", "damaged"])
def test_corrupt_archives_are_refused(tmp_path, suffix, opener, damage):
    path = tmp_path / f"corpus{suffix}"
    _write(path, LINES * 100, opener)
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "truncated": whole[:-20],
        "not an archive": b"plain text",
        "damaged": whole[:middle] + b"\xff" * 8 + whole[middle + 8 :],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(
        UserError, match=rf"corpus{suffix}' is corrupt \(.*\); restore or remove it"
    ):
        open_sentences(str(path))


def test_files_that_are_not_utf8_are_refused(tmp_path):
    (tmp_path / "latin.txt").write_bytes("Wörter".encode("latin-1"))
    with pytest.raises(UserError, match="is not UTF-8 text"):
        open_sentences(str(tmp_path / "latin.txt"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tfds:lm1b", "corpus 'tfds:lm1b': must be tfds:DATASET:SPLIT"),
        (
            "tfds:lm1b:train",
            "the TFDS corpus 'tfds:lm1b:train' cannot be opened in .*scripts/prepare_lm1b.sh",
        ),
        ("tfds:no_such_set:train", "the TFDS corpus 'tfds:no_such_set:train' cannot be opened"),
    ],
)
def test_invalid_or_missing_tfds_corpora_are_refused(tmp_path, spec, message):
    with pytest.raises(UserError, match=message):
        open_sentences(spec, str(tmp_path))
