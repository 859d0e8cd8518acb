"""Tests drafts for large vocabularies: a low-rank embedding, and a head over some tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax import Policy, check_model, generate, get_method
from spectr_jax.models.formats.weights import load_weights, save_weights
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import Int8Linear, quantize
from spectr_jax.models.vocabulary import Constant
from spectr_jax.testing.chi_square import p_value
from spectr_jax.utils.errors import UserError

SHAPE = LlamaConfig(
    layers=2,
    width=24,
    mlp=40,
    heads=2,
    kv_heads=2,
    head_width=12,
    vocab_size=31,
    context=64,
    embed_rank=6,
    head_tokens=9,
)
KEPT = np.array([0, 3, 4, 7, 11, 12, 20, 29, 30], np.int32)


def student(seed=0) -> Llama:
    model = Llama(SHAPE, rngs=nnx.Rngs(seed))
    model.head.tokens = Constant(jnp.asarray(KEPT))
    return model


def logits(model, tokens) -> np.ndarray:
    positions = jnp.arange(len(tokens))[None]
    return np.asarray(
        model.extend(jnp.asarray([tokens]), positions, np.tri(len(tokens), dtype=bool)[None])[0]
    )[0]


def test_a_partial_head_scores_only_its_tokens():
    model, tokens = student(), [3, 19, 30, 1]
    hidden, _ = model.hidden(
        jnp.asarray([tokens]), jnp.arange(4)[None], np.tri(4, dtype=bool)[None]
    )
    wanted = np.asarray(hidden[0], np.float64) @ np.asarray(
        model.head.linear.kernel[...], np.float64
    )
    found = logits(model, tokens)
    np.testing.assert_allclose(found[:, KEPT], wanted, atol=1e-5)
    assert np.isneginf(np.delete(found, KEPT, axis=1)).all() and found.shape == (4, 31)
    assert np.asarray(model.embed.table.embedding[...]).shape == (31, 6)


def test_drafts_with_a_partial_head_follow_the_protocol():
    check_model(student())


def test_drafts_with_a_partial_head_are_saved_and_quantized(tmp_path):
    model = student()
    for dtype in ("bfloat16", "int8"):
        save_weights(tmp_path / dtype, model, "digest of a vocabulary", {}, dtype)
        loaded, vocabulary = load_weights(tmp_path / dtype)
        assert vocabulary == "digest of a vocabulary" and loaded.config == SHAPE
        np.testing.assert_array_equal(loaded.head.tokens[...], KEPT)
        np.testing.assert_allclose(
            logits(loaded, [5, 6])[:, KEPT], logits(model, [5, 6])[:, KEPT], atol=0.15
        )
        assert load_weights(tmp_path / dtype, "bfloat16")[0].head.tokens[...].dtype == jnp.int32
    small = quantize(model)
    assert all(
        isinstance(part, Int8Linear)
        for part in (small.head.linear, small.embed.widen, small.blocks[0].qkv)
    )
    np.testing.assert_allclose(
        logits(small, [5, 6])[:, KEPT], logits(model, [5, 6])[:, KEPT], atol=0.1
    )


def test_a_partial_head_keeps_the_target_distribution():
    """Tests the first new token of 5,000 sequences; the draft gives most tokens probability 0."""
    target = Llama(dataclasses.replace(SHAPE, embed_rank=0, head_tokens=0), rngs=nnx.Rngs(1))
    keys, prompts = jax.random.split(jax.random.key(0), 5_000), np.tile([[3, 5]], (5_000, 1))
    policy, first = Policy(temperature=0.5), jax.nn.softmax(logits(target, [3, 5])[-1] / 0.5)
    method = get_method("speculative", draft_length=2)
    made = generate(keys, method, target, student(), prompts, np.full(5_000, 2), 2, policy)
    counts = np.bincount(np.asarray(made.tokens)[:, 2], minlength=31)
    assert p_value(counts, np.asarray(first, np.float64)) > 1e-3
    assert np.asarray(made.emitted_per_call)[:, 2:].sum() > 0  # Some drafts are accepted.


def test_invalid_partial_heads_are_refused():
    with pytest.raises(UserError, match="tied=True: must be False"):
        dataclasses.replace(SHAPE, tied=True)
    with pytest.raises(UserError, match=r"at most vocab_size=31; lower model.head_tokens"):
        dataclasses.replace(SHAPE, head_tokens=32)
