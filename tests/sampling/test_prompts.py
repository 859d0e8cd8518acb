"""Tests how prompts are read from files and stdin."""

import io

from spectr_jax.sampling import prompts

TEXT = "\ufeffone\x0ctwo\x0bthree\r\n\n \nfour\u2028five\x85six\rseven\n"
LINES = ["one\x0ctwo\x0bthree", "four\u2028five\x85six\rseven"]


def test_files_and_stdin_have_the_same_lines(tmp_path):
    r"""Only \n and \r\n end a line, and a byte-order mark at the start is dropped."""
    (tmp_path / "prompts.txt").write_bytes(TEXT.encode())
    assert prompts.from_file(str(tmp_path / "prompts.txt")) == dict(zip((1, 4), LINES, strict=True))
    stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="utf-8")
    assert list(prompts.from_stdin(stdin)) == LINES
