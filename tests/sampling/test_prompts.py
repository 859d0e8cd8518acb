"""Tests how prompts are read from files and stdin."""

import io

import pytest

from spectr_jax.sampling import prompts
from spectr_jax.utils.errors import UserError

TEXT = "\ufeffone\x0ctwo\x0bthree\r\n\n \nfour\u2028five\x85six\rseven\n"
LINES = ["one\x0ctwo\x0bthree", "four\u2028five\x85six\rseven"]


def test_files_and_stdin_have_the_same_lines(tmp_path):
    r"""Only \n and \r\n end a line, and a byte-order mark at the start is dropped."""
    (tmp_path / "prompts.txt").write_bytes(TEXT.encode())
    assert prompts.from_file(str(tmp_path / "prompts.txt")) == dict(zip((1, 4), LINES, strict=True))
    stdin = io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="utf-8")
    assert list(prompts.from_stdin(stdin)) == LINES


def test_json_lines_are_strings_or_objects_with_a_prompt(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('\ufeff"a\\nb"\r\n\n{"id": 3, "prompt": " c\u2028日 "}\n'.encode())
    assert prompts.from_file(str(path)) == {1: "a\nb", 3: " c\u2028日 "}
    for line, message in (
        ('"a', r"line 2 is not JSON \(Unterminated string"),
        ("a", r"line 2 is not JSON \(Expecting value"),
        ('{"text": "a"}', 'line 2 has no "prompt"; give a JSON string'),
        (r'"\ud800"', "line 2 is not JSON .*surrogates not allowed"),
        ("[" * 10**5, "line 2 is not JSON .*nested too deeply"),
        ('""', "line 2 has the prompt ''; give a JSON string"),
        ('{"prompt": " "}', "line 2 has the prompt ' '"),
        ('{"prompt": 3}', "line 2 has the prompt 3"),
        ("null", "line 2 has the prompt None"),
    ):
        path.write_text(f'"fine"\n{line}\n')
        with pytest.raises(UserError, match=f"^--file={path}: {message}"):
            prompts.from_file(str(path))
