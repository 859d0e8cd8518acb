"""Tests the error for files that Git LFS has not fetched."""

import pytest

from spectr_jax.data.hugging_face import read_tokenizer
from spectr_jax.models.formats.folder import Folder
from spectr_jax.models.formats.gguf import GGUF
from spectr_jax.models.weights import load_weights
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
