"""Tests that held-out scores do not depend on packing, padding or line ends."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.data.corpus import open_sentences
from spectr_jax.data.tokenizer import BOS, EOS, train_tokenizer
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.training.heldout import evaluate, pack_heldout
from spectr_jax.training.step import eval_step
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(corpus, tmp_path_factory):
    lines = (corpus / "train.txt").read_text().splitlines()
    return train_tokenizer(lines, tmp_path_factory.mktemp("tokenizer") / "tokenizer.model", 320)


@pytest.mark.parametrize("rows", [2, 16])
def test_heldout_scores_equal_those_of_single_sentences(config, tokenizer, rows):
    """Scores are means over all tokens, for any packing. Sentences that do not fit are left out."""
    run = config(batch_size=rows, **{"model.context": 28, "model.dropout": 0.0})
    sentences = open_sentences(run.data.heldout)
    model = Transformer(TransformerConfig(**run.model), rngs=nnx.Rngs(0))
    heldout = pack_heldout(sentences, tokenizer, rows=rows, length=28)
    assert all(batch["inputs"].shape == (rows, 28) for batch in heldout.batches)
    score = jax.jit(functools.partial(eval_step, nnx.split(model)[0]))
    ours = evaluate(score, nnx.state(model), heldout, sharding.make_mesh())
    nats = tokens = characters = left_out = 0
    for index in range(len(sentences)):
        pieces = tokenizer.encode(sentences[index])
        if len(pieces) + 1 > 28:
            left_out += 1
            continue
        count = len(pieces) + 1
        inputs = np.zeros((1, 28), np.int32)
        inputs[0, :count] = [BOS, *pieces]
        logits, _ = model.extend(inputs, np.arange(28)[None], np.tri(28, dtype=bool)[None])
        pmf = jax.nn.log_softmax(logits[0, :count])
        nats -= float(jnp.sum(pmf[np.arange(count), [*pieces, EOS]]))
        tokens += count
        characters += len(sentences[index]) + 1
    assert 0 < left_out < len(sentences)
    assert ours["eval_nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
    assert ours["eval_bits_per_character"] == pytest.approx(
        nats / math.log(2) / characters, rel=1e-5
    )


def test_line_ends_and_blank_lines_leave_heldout_data_unchanged(corpus, tokenizer, tmp_path):
    """A line end counts as one character. A blank line counts as none: it is easy to predict."""
    lines = (corpus / "heldout.txt").read_text().splitlines()
    other = tmp_path / "other.txt"
    other.write_bytes("".join(f"{line}\r\n\r\n  \n" for line in lines).encode())
    packed = [
        pack_heldout(open_sentences(str(path)), tokenizer, rows=4, length=64)
        for path in (corpus / "heldout.txt", other)
    ]
    assert packed[0].characters == packed[1].characters == sum(len(line) + 1 for line in lines)
    for ours, theirs in zip(*(each.batches for each in packed), strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_context_too_short_for_any_sentence_is_refused(config, tokenizer):
    run = config()
    with pytest.raises(
        UserError, match=r"data.heldout=.*: no sentence fits 2 tokens; raise model.context"
    ):
        pack_heldout(open_sentences(run.data.heldout), tokenizer, rows=8, length=2)
