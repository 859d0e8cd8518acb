"""Tests how files are read: JSON and text by Windows, pointers of Git LFS, and bad paths."""

import pytest

from spectr_jax.data.hugging_face import read_names, read_template, read_tokenizer
from spectr_jax.data.packed import open_corpus
from spectr_jax.distillation.labels import open_labels
from spectr_jax.experiments.config import eval_config
from spectr_jax.experiments.measure.finished import check_table
from spectr_jax.experiments.measure.journal import Journal
from spectr_jax.models.formats import runs
from spectr_jax.models.formats.folder import Folder
from spectr_jax.models.formats.gguf import GGUF
from spectr_jax.models.formats.weights import load_weights
from spectr_jax.training import preparation
from spectr_jax.training.config import train_config
from spectr_jax.utils.errors import UserError

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n"


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.safetensors", lambda file: Folder(file.parent)),
        ("tokenizer.json", lambda file: read_tokenizer(file.parent)),
        ("model.gguf", GGUF),
        ("draft.safetensors", load_weights),
    ],
)
def test_a_git_lfs_pointer_is_refused_with_the_fix(tmp_path, name, read):
    """A repository cloned without Git LFS has pointers instead of large files."""
    file = tmp_path / name
    file.write_text(POINTER)
    with pytest.raises(
        UserError,
        match=rf"^'[^']*{name}' is a pointer of Git LFS, not the file itself; run 'git lfs pull'",
    ):
        read(file)


@pytest.mark.parametrize("content", ["[" * 100_000 + "\n", b"\xff\n"], ids=["nested", "not UTF-8"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("packed.json", lambda folder: open_corpus(f"packed:{folder}")),
        ("labels.json", lambda folder: open_labels(str(folder))),
        ("config.json", runs.open_run),
        (
            "config.json",
            lambda folder: preparation.check_workdir(train_config(), folder, train_config()),
        ),
        ("student.json", runs.read_student),
        ("table.json", lambda folder: check_table(eval_config(), folder, "table")),
        ("table.part.jsonl", lambda folder: Journal(folder, "table", eval_config(), [])),
        ("tokenizer_config.json", read_names),
    ],
)
def test_damaged_json_is_refused_in_one_line(tmp_path, name, read, content):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        read(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


def test_byte_order_marks_of_a_models_files_are_dropped(tmp_path):
    for name, text in (
        ("tokenizer_config.json", '{"bos_token": "<s>"}'),
        ("chat_template.jinja", "{{ m }}"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert read_names(tmp_path) == {"bos_token": "<s>"} and read_template(tmp_path) == "{{ m }}"
