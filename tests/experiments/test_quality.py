"""Bits per character of small models with random weights, against the sentences one by one."""

import json
import math
import re

import jax
import numpy as np
import pytest

from spectr_jax.config import quality_config
from spectr_jax.data.tokenizer import BOS, EOS
from spectr_jax.errors import UserError
from spectr_jax.experiments import quality
from spectr_jax.experiments.quality import run
from spectr_jax.loading import load


def _config(toy, **changes):
    config = quality_config()
    given = {"models": (str(toy.folder / "target"),)}
    config.update({**given, "heldout": str(toy.folder / "prompts.txt"), "sentences": 7, "batch_size": 4, **changes})
    return config


def test_scores_are_those_of_the_sentences(toy, tmp_path, monkeypatch):
    """Although it is stopped at the second of three, and goes on; the first is said to have taken an hour."""
    scores, begun = quality._scores, []

    def stopped(config, sentences, spec, dtype):
        begun.append(dtype)
        if dtype == "bfloat16" and begun.count(dtype) == 1:
            raise KeyboardInterrupt
        return scores(config, sentences, spec, dtype)

    monkeypatch.setattr(quality, "_scores", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(_config(toy), tmp_path)
    journal = tmp_path / "quality.part.jsonl"
    journal.write_text(re.sub(r'"seconds": [\d.]+}\n', '"seconds": 3600}\n', journal.read_text()))
    result = run(_config(toy), tmp_path)
    assert begun.count("float32") == 1 and result["seconds"] >= 3600 and not journal.exists()
    assert json.loads((tmp_path / "quality.json").read_text()) == result
    assert [row["model"] for row in result["rows"]] == ["target"]
    for row in result["rows"]:
        model, tokenizer = load(str(toy.folder / row["model"]))[1:]
        nats = tokens = 0
        for line in toy.prompts[:7]:
            pieces = [BOS, *tokenizer.encode(line), EOS]
            count = len(pieces) - 1
            logits, _ = model.extend(np.array([pieces[:-1]]), np.arange(count)[None], np.tri(count, dtype=bool)[None])
            nats -= float(np.sum(np.asarray(jax.nn.log_softmax(logits[0]))[np.arange(count), pieces[1:]]))
            tokens += count
        scores = row["scores"]["float32"]
        characters = sum(len(line) + 1 for line in toy.prompts[:7])
        assert scores["eval_nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
        assert scores["eval_bits_per_character"] == pytest.approx(nats / math.log(2) / characters, rel=1e-5)
        for dtype in ("bfloat16", "int8"):
            other = row["scores"][dtype]["eval_bits_per_character"]
            assert other != scores["eval_bits_per_character"]
            assert other == pytest.approx(scores["eval_bits_per_character"], rel=0.01)
    table = [line.split("|") for line in (tmp_path / "quality.md").read_text().splitlines() if line[:1] == "|"]
    assert table[2][4].strip() == f"{result['rows'][0]['scores']['float32']['eval_bits_per_character']:.4f}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtypes": ("int4",)}, "dtype='int4'"),
        ({"models": ("nowhere",)}, "no model at 'nowhere'"),
        ({"sentences": 0}, "'sentences' is 0"),
    ],
)
def test_bad_configs(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run(_config(toy, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
