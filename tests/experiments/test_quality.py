"""Tests the bits per character of small models with random weights."""

import json
import math
import re

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx

from spectr_jax.data.hugging_face import HuggingFaceTokenizer, read_tokenizer
from spectr_jax.data.tokenizer import BOS, EOS
from spectr_jax.experiments import quality
from spectr_jax.experiments.config import quality_config
from spectr_jax.experiments.quality import run, scored_tokens
from spectr_jax.loading.by_name import load
from spectr_jax.models.formats.hf_llama import save_llama
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils.errors import UserError


def _config(toy, **changes):
    config = quality_config()
    given = {"models": (str(toy.folder / "target"),)}
    config.update(
        {
            **given,
            "heldout": str(toy.folder / "prompts.txt"),
            "sentences": 7,
            "batch_size": 4,
            **changes,
        }
    )
    return config


def _check(scores, model, lines, pieces):
    """Checks the scores against the model's log-probabilities of each sentence alone."""
    nats = 0
    for first, *others in pieces:
        count = len(others)
        inputs = np.array([[first, *others[:-1]]]), np.arange(count)[None]
        logits, _ = model.extend(*inputs, np.tri(count, dtype=bool)[None])
        nats -= float(np.sum(np.asarray(jax.nn.log_softmax(logits[0]))[np.arange(count), others]))
    tokens, characters = sum(len(each) - 1 for each in pieces), sum(len(line) + 1 for line in lines)
    bits = nats / math.log(2) / characters
    assert scores["eval_nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
    assert scores["eval_bits_per_character"] == pytest.approx(bits, rel=1e-5)


def test_scores_equal_those_of_sentences_scored_alone(toy, tmp_path, monkeypatch):
    """The run is stopped at the second of three precisions and resumes. The test sets the time of
    the first to one hour, which the result must include."""
    scores, begun = quality._scores, []

    def stopped(sentences, batch_size, contender, dtype):
        begun.append(dtype)
        if dtype == "bfloat16" and begun.count(dtype) == 1:
            raise KeyboardInterrupt
        return scores(sentences, batch_size, contender, dtype)

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
        scores, lines = row["scores"]["float32"], toy.prompts[:7]
        _check(scores, model, lines, [[BOS, *tokenizer.encode(line), EOS] for line in lines])
        for dtype in ("bfloat16", "int8"):
            other = row["scores"][dtype]["eval_bits_per_character"]
            assert other != scores["eval_bits_per_character"]
            assert other == pytest.approx(scores["eval_bits_per_character"], rel=0.01)
    table = [
        line.split("|")
        for line in (tmp_path / "quality.md").read_text().splitlines()
        if line[:1] == "|"
    ]
    assert (
        table[2][4].strip()
        == f"{result['rows'][0]['scores']['float32']['eval_bits_per_character']:.4f}"
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Returns a folder with a small Llama of random weights and a byte-pair tokenizer.

    The tokenizer adds no BOS, and its BOS is another token than `<|endoftext|>`.
    """
    folder = tmp_path_factory.mktemp("llama")
    pairs = tokenizers.ByteLevelBPETokenizer()
    controls = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    pairs.train_from_iterator(
        ["draft target token law"] * 9, vocab_size=280, special_tokens=controls, show_progress=False
    )
    tokenizer = HuggingFaceTokenizer(
        tokenizers.Tokenizer.from_str(pairs.to_str()), 0, 1, adds_bos=False
    )
    shape = LlamaConfig(
        layers=1,
        width=16,
        mlp=32,
        heads=2,
        kv_heads=1,
        head_width=8,
        vocab_size=tokenizer.vocab_size,
        context=24,
    )
    save_llama(folder, Llama(shape, rngs=nnx.Rngs(0)), 0, 1)
    tokenizer.save(folder, shape.context)
    return folder


@pytest.mark.slow
def test_models_are_compared_on_sentences_that_fit_all(toy, llama, tmp_path):
    """A Llama and our model are scored on the sentences that fit both. The test computes their nats
    on its own."""
    fitting = ["law law", "draft target token 3 law", "x" * 23, "the token 日", "a", "target"]
    # The first has 25 tokens with the newline, one more than the Llama's context. The second has
    # more tokens than the 32 of our model's context.
    too_long = ["x" * 24, "draft " * 18]
    (tmp_path / "heldout.txt").write_text(
        "\n".join([too_long[0], *fitting, too_long[1], "not among the first"])
    )
    own, other = str(toy.folder / "target"), f"hf:{llama}"
    heldout = str(tmp_path / "heldout.txt")
    changes = {
        "models": (own, other),
        "dtypes": ("float32",),
        "sentences": 8,
        "batch_size": 2,
        "heldout": heldout,
    }
    result = run(_config(toy, **changes), tmp_path / "run")
    assert result["sentences"] == len(fitting)
    for spec, row in zip((own, other), result["rows"], strict=True):
        _, model, tokenizer = load(spec)
        ends = tokenizer.encode("\n") if spec == other else [EOS]
        begins = 2 if spec == other else BOS
        pieces = [[begins, *tokenizer.encode(line), *ends] for line in fitting]
        _check(row["scores"]["float32"], model, fitting, pieces)
        assert row["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    assert "all models score the 6 that fit" in (tmp_path / "run" / "quality.md").read_text()
    with pytest.raises(UserError, match=r"heldout='.*': no sentence fits .*, 'hf:.*llama"):
        run(_config(toy, **{**changes, "sentences": 1}), tmp_path / "none")


def test_sentences_get_a_start_token_and_a_line_end(toy, llama, in_hugging_face):
    """A sentence starts with BOS or the separator, and ends with a newline or EOS. Our tokenizer
    gives the same tokens after its conversion to Hugging Face's format."""
    ours = load(str(toy.folder / "target")).tokenizer
    written = HuggingFaceTokenizer(in_hugging_face(ours), BOS, (EOS, 3))
    line = "token 3 law"
    assert (
        scored_tokens(ours, line) == scored_tokens(written, line) == [BOS, *ours.encode(line), EOS]
    )
    pairs = read_tokenizer(llama)
    tokens = pairs.encode(f"{line}\n").ids
    assert tokens[-1] == pairs.encode("\n").ids[0]
    assert scored_tokens(HuggingFaceTokenizer(pairs, 0, 1), line) == [0, *tokens]
    assert scored_tokens(HuggingFaceTokenizer(pairs, 0, 1, adds_bos=False), line) == [2, *tokens]
    bare = tokenizers.ByteLevelBPETokenizer()
    bare.train_from_iterator([line], vocab_size=270, special_tokens=["<s>"], show_progress=False)
    alone = HuggingFaceTokenizer(tokenizers.Tokenizer.from_str(bare.to_str()), 0, 0, adds_bos=False)
    assert (
        scored_tokens(alone, line)[0] == 0
    )  # The vocabulary has no separator, so BOS comes first.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtypes": ("int4",)}, "dtype='int4'"),
        ({"models": ("nowhere",)}, "no model at 'nowhere'"),
        ({"sentences": 0}, "sentences=0: must be at least 1"),
    ],
)
def test_bad_configs_are_refused_before_any_work(toy, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        run(_config(toy, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()
