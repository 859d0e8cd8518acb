"""Tests the sequences that a teacher reads or writes, and the labels that it gives them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding import Policy
from spectr_jax.distillation import labels
from spectr_jax.distillation import teacher as teaching
from spectr_jax.utils import backend
from spectr_jax.utils.errors import UserError

from .conftest import LENGTH, about


def log_probabilities(model, tokens):
    """Returns log-probabilities [N, V] after each token of one sequence."""
    positions, visible = jnp.arange(len(tokens))[None], np.tri(len(tokens), dtype=bool)[None]
    return np.asarray(
        jax.nn.log_softmax(model.extend(jnp.asarray([tokens]), positions, visible)[0])[0]
    )


@pytest.fixture(autouse=True)
def short_shards(monkeypatch):
    monkeypatch.setattr(teaching, "SHARD", 10)


def label(folder, teacher, texts, count):
    labels.claim_folder(folder, about(teacher))
    row_type = labels.row_type(teacher.model.vocab_size, LENGTH)
    return teaching.write_labels(folder, texts, count, teaching.labeller(teacher), row_type)


def sequences(rows):
    """Yields the tokens of each sequence, its row, and its indices in the row."""
    for row in rows:
        for number in range(1, row["segments"].max() + 1):
            where = np.flatnonzero(row["segments"] == number)
            yield row["tokens"][where].tolist(), row, where


def test_labels_are_the_teachers_likeliest_tokens(teacher, sentences, tmp_path, monkeypatch):
    monkeypatch.setattr(labels, "TOP", 5)
    texts = teaching.read_texts(sentences, teacher.tokenizer)
    assert label(tmp_path / "labels", teacher, texts, 40) > 200
    rows = labels.open_labels(str(tmp_path / "labels"))
    seen = []
    for tokens, row, where in sequences(rows.take(np.arange(len(rows)))):
        seen.append(tokens)
        wanted = log_probabilities(teacher.model, tokens)
        best = -np.sort(-wanted, axis=1)[:, :5]
        np.testing.assert_allclose(row["log_probabilities"][where], best, atol=5e-3)
        named = np.take_along_axis(wanted, row["top"][where].astype(int), axis=1)
        np.testing.assert_allclose(named, best, atol=1e-5)
        assert row["drafted"][where].all() and row["drafted"].sum() == (row["segments"] > 0).sum()
    given = [teacher.tokenizer.encode(sentence)[:LENGTH] for sentence in sentences[:40]]
    assert sorted(seen) == sorted(tokens for tokens in given if len(tokens) > 1)


def test_positions_and_targets_restart_at_each_packed_sequence(teacher, sentences, tmp_path):
    label(tmp_path / "labels", teacher, teaching.read_texts(sentences, teacher.tokenizer), 30)
    rows = labels.open_labels(str(tmp_path / "labels")).take(np.arange(4))
    batch = labels.batch_of(rows)
    for index, row in enumerate(rows):
        for tokens, _, where in sequences(row[None]):
            np.testing.assert_array_equal(batch["positions"][index, where], np.arange(len(where)))
            np.testing.assert_array_equal(batch["targets"][index, where], [*tokens[1:], -1])
    assert (batch["positions"][batch["segments"] == 0] == 0).all()


def test_small_counts_make_small_shards(teacher, sentences, tmp_path, monkeypatch):
    """A shard that the teacher writes on a CPU is small, because it takes long."""
    monkeypatch.setattr(teaching, "SHARD", 512)
    sizes = [teaching.shard_size(count, False) for count in (8, 512, 513, 20_000)]
    assert sizes == [8, 512, 257, 500] and teaching.shard_size(512, True) == 64
    with monkeypatch.context() as patched:
        patched.setattr(backend, "on_cpu", lambda: False)
        assert teaching.shard_size(512, True) == 512
    folder, texts = tmp_path / "labels", teaching.read_texts(sentences, teacher.tokenizer)
    row_type, stored = labels.row_type(teacher.model.vocab_size, LENGTH), []
    for count in (8, 20):  # The second command keeps the size of the first.
        claimed = labels.claim_folder(
            folder, about(teacher, shard=teaching.shard_size(count, False))
        )
        fill = teaching.labeller(teacher)
        teaching.write_labels(folder, texts, count, fill, row_type, claimed["shard"])
        stored.append(sorted(path.name for path in folder.glob("*.npy")))
    assert [len(names) for names in stored] == [1, 3]
    seen = [tokens for tokens, *_ in sequences(labels.open_labels(str(folder)).take(np.arange(3)))]
    assert seen and all(len(tokens) > 1 for tokens in seen)


def test_an_interrupted_command_says_what_is_stored(teacher, sentences, tmp_path, capsys):
    texts, calls = teaching.read_texts(sentences, teacher.tokenizer), []

    def fill(rows):
        calls.append(len(rows))
        if len(calls) == 3:
            raise KeyboardInterrupt

    labels.claim_folder(tmp_path, about(teacher))
    row_type = labels.row_type(teacher.model.vocab_size, LENGTH)
    with pytest.raises(KeyboardInterrupt):
        teaching.write_labels(tmp_path, texts, 25, fill, row_type)
    shown = capsys.readouterr()
    assert "10 of 30 sequences are stored" in shown.out
    assert "/30 [" in shown.err and "sequence" in shown.err


def test_labelling_resumes_and_reports_damaged_or_mismatched_folders(teacher, sentences, tmp_path):
    texts, folder = teaching.read_texts(sentences, teacher.tokenizer), tmp_path / "labels"
    label(folder, teacher, texts, 11)  # The second shard is completed too.
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}
    (folder / "labels-00000.npy").unlink()
    label(folder, teacher, texts, 30)
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.npy")}
    assert len(after) == 3 and after["labels-00001.npy"] == before["labels-00001.npy"]
    label(tmp_path / "at_once", teacher, texts, 30)
    for name in after:
        assert (folder / name).read_bytes() == (tmp_path / "at_once" / name).read_bytes()
    with pytest.raises(UserError, match="has labels of length=24, this command makes length=12"):
        labels.claim_folder(folder, about(teacher, length=12))
    (folder / "labels-00002.npy").write_bytes((folder / "labels-00002.npy").read_bytes()[:-7])
    with pytest.raises(
        UserError, match=r"labels-00002.npy' cannot be read .*; remove it, and label again"
    ):
        labels.open_labels(str(folder))
    (folder / "labels-00002.npy").unlink()
    (folder / "labels-00000.npy").rename(folder / "labels-00002.npy")
    with pytest.raises(
        UserError, match=r"has labels-00001.npy and no labels-00000.npy; run `label` there again"
    ):
        labels.open_labels(str(folder))
    (folder / "labels-00002.npy").rename(folder / "labels-00000.npy")
    index = json.loads((folder / labels.INDEX).read_text())
    (folder / labels.INDEX).write_text(
        json.dumps({name: index[name] for name in index if name != "context"})
    )
    for place, message in (
        (folder, "labels.json does not say context"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(UserError, match=f"has no labels that can be read .*{message}"):
            labels.open_labels(str(place))


def test_labels_of_different_teachers_are_not_mixed(teacher, sentences, tmp_path):
    """Folders may hold labels of one teacher in several dtypes, but not of several teachers.

    An index without shards is replaced.
    """
    mine = about(teacher, teacher="school:teacher", dtype="int8", weights="aaa")
    row_type, fill = labels.row_type(teacher.model.vocab_size, LENGTH), teaching.labeller(teacher)
    texts = teaching.read_texts(sentences, teacher.tokenizer)
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder, changed in zip(
        folders, ({}, {"weights": "bbb"}, {"dtype": "float32", "weights": "ccc"}), strict=True
    ):
        labels.claim_folder(folder, {**mine, "length": 12})
        labels.claim_folder(folder, {**mine, **changed})
        teaching.write_labels(folder, texts, 10, fill, row_type)
    one, two, three = map(str, folders)
    with pytest.raises(
        UserError,
        match=r"of 'school:teacher' .bbb. and .* of 'school:teacher' .aaa., another teacher",
    ):
        labels.open_labels(f"{one},{two}")
    assert len(labels.open_labels(f"{one},{three}").counts) == 2, (
        "the same teacher in another dtype is accepted"
    )
    with pytest.raises(
        UserError,
        match="has labels of weights='aaa', dtype='int8', this command makes weights='bbb', dtype=",
    ):
        labels.claim_folder(folders[0], {**mine, "weights": "bbb"})


def test_labels_of_different_corpora_are_not_mixed(teacher, tmp_path):
    """The digest identifies a corpus, so its path may change. Chats have no digest."""
    text = {"text": "text/*", "sentences": 5, "corpus": "aaa"}
    ours = about(teacher, **text)
    labels.claim_folder(tmp_path / "labels", ours)
    labels.shard_path(tmp_path / "labels", 0).write_bytes(b"")
    labels.claim_folder(tmp_path / "labels", {**ours, "text": "/home/me/text/*"})
    for changed, told in (
        (
            {"corpus": "bbb"},
            r"corpus='aaa', text='text/\*', sentences=5, this command makes corpus='bbb', text=",
        ),
        (
            {"corpus": "bbb", "context": 7, "teacher": "other"},
            "teacher='school:teacher', this command makes teacher='other';",
        ),
    ):
        with pytest.raises(UserError, match=f"has labels of {told}"):
            labels.claim_folder(tmp_path / "labels", {**ours, **changed})
    chats = {**ours, "text": "", "sentences": 0, "corpus": ""}
    labels.claim_folder(tmp_path / "chats", chats)
    labels.shard_path(tmp_path / "chats", 0).write_bytes(b"")
    with pytest.raises(UserError, match="has labels of corpus='', text='', sentences=0, this"):
        labels.claim_folder(tmp_path / "chats", ours)
    labels.shard_path(tmp_path / "labels", 0).rename(
        tmp_path / "labels/labels-00000.npy.123.partial"
    )
    # A command that was killed during its first shard leaves only this partial file.
    labels.claim_folder(tmp_path / "labels", ours)
    (tmp_path / "labels/text.txt").write_text("A user's own.")
    with pytest.raises(UserError, match=r"--out=.*labels: has other files, such as 'text.txt'"):
        labels.claim_folder(tmp_path / "labels", ours)


def test_the_last_shard_has_the_remaining_sequences(teacher, sentences):
    texts = teaching.read_texts(sentences[:13], teacher.tokenizer)
    assert len(texts(0, 10)) == 10 and len(texts(10, 20)) == 3
    assert (
        len(teaching.continued_texts(teacher, sentences[:13], LENGTH, Policy(), seed=0)(10, 14))
        == 4
    )


def test_counts_limit_the_rows_read_from_each_folder(teacher, sentences, tmp_path):
    texts = teaching.read_texts(sentences, teacher.tokenizer)
    for name, count in (("one", 20), ("two", 10)):
        label(tmp_path / name, teacher, texts, count)
    both = f"{tmp_path / 'one'},{tmp_path / 'two'}"
    whole = labels.open_labels(both)
    one, two = whole.counts
    some = labels.open_labels(both, (one - 2, 3))
    kept = [*range(one - 2), *range(one, one + 3)]
    assert some.counts == (one - 2, 3) and len(some) == len(kept)
    np.testing.assert_array_equal(some.take(np.arange(len(some))), whole.take(np.array(kept)))
    with pytest.raises(
        UserError, match=f"two' has {two} rows, and had {two + 1} before; restore its shards"
    ):
        labels.open_labels(both, (one, two + 1))
    for counts in ((one,), (one, two, 3)):
        given = f"names 2 sources, and named {len(counts)} when the run began"
        with pytest.raises(UserError, match=f"data.train: {given}"):
            labels.open_labels(both, counts)


def test_the_teacher_continues_prefixes_of_sentences(teacher, sentences):
    texts = teaching.continued_texts(
        teacher, sentences, LENGTH, Policy(eos=teacher.tokenizer.eos), seed=0
    )
    made = texts(5, 15)
    assert made == texts(5, 15) != texts(15, 25)
    for (tokens, prompt, ended), sentence in zip(made, sentences[5:15], strict=True):
        known = teacher.tokenizer.encode(sentence)
        assert tokens[:prompt] == known[:prompt] and 1 <= prompt < len(tokens) <= LENGTH
        assert ended == teacher.tokenizer.ends(tokens[-1])
        ends = [teacher.tokenizer.ends(token) for token in tokens]
        assert not any(ends[:-1]) and (ends[-1] or len(tokens) == LENGTH)
    assert len({tuple(text.tokens) for text in made}) == 10
    cold = teaching.continued_texts(
        teacher, sentences, LENGTH, Policy(temperature=0.0, eos=teacher.tokenizer.eos), seed=0
    )
    for tokens, *_ in cold(0, 3):
        likeliest = log_probabilities(teacher.model, tokens).argmax(1)
        assert (likeliest[len(tokens) // 2 + 6 : -1] == tokens[len(tokens) // 2 + 7 :]).all()


def test_later_batches_of_generated_text_compile_nothing(teacher, sentences, count_compilations):
    policy = Policy(eos=teacher.tokenizer.eos)
    for texts in (
        teaching.continued_texts(teacher, sentences, LENGTH, policy, seed=0),
        teaching.conversations(teacher, 40, policy, seed=3),
    ):
        texts(0, 6)
        with count_compilations() as compiled:
            texts(6, 12)
        assert not compiled


def test_the_teacher_writes_both_sides_of_a_chat(teacher):
    opening, closing = teaching.chat_frame(teacher.tokenizer)
    said = teacher.tokenizer.encode("token tree")
    assert [*opening, *said, *closing] == teacher.tokenizer.chat(
        [{"role": "user", "content": "token tree"}]
    )
    texts = teaching.conversations(teacher, 40, Policy(eos=teacher.tokenizer.eos), seed=3)
    for text in texts(0, 6):
        tokens = text.tokens
        assert tokens[: len(opening)] == opening and len(tokens) <= 40
        assert tokens[text.prompt - len(closing) : text.prompt] == closing
        answered = np.flatnonzero(text.drafted)
        assert answered[0] == text.prompt - 1, "the answer's first token must be drafted"
        assert answered[-1] == len(tokens) - (2 if teacher.tokenizer.ends(tokens[-1]) else 1), (
            "no draft may be requested after an end token"
        )
        assert len(answered) == answered[-1] - answered[0] + 1
    longest = 2 * (64 + len(opening)) // 3
    written = teaching.conversations(teacher, longest, Policy(), seed=3)(0, 6)
    assert max(len(text.tokens) for text in written) == longest
    with pytest.raises(
        UserError, match=f"--length={longest + 1}: must be at most {longest}, .* 64"
    ):
        teaching.conversations(teacher, longest + 1, Policy(), seed=3)
    with pytest.raises(UserError, match="--length=12: the chat template alone takes"):
        teaching.conversations(teacher, 12, Policy(), seed=0)
