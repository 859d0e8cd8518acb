"""Tests that the programs in examples/ run and do what they say."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from spectr_jax import generate, get_method

FOLDER = pathlib.Path(__file__).parents[1] / "examples"


def _module(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_fewer_than_100_lines():
    files = sorted(FOLDER.glob("*.py"))
    assert [file.stem for file in files] == [
        "gemma_model",
        "linen_model",
        "own_model",
        "plan_alone",
        "policy_gradient",
        "train_draft",
    ]
    assert all(len(file.read_text().splitlines()) < 100 for file in files)


def test_plan_alone_measures_the_exact_acceptance_and_distribution():
    accepted, exact, error = _module("plan_alone").main("kseq")
    assert abs(accepted - exact) < 0.01 and error < 0.01


@pytest.mark.slow
def test_own_model_decodes_several_tokens_per_call():
    assert _module("own_model").main() > 1


def test_linen_model_decodes_several_tokens_per_call():
    assert _module("linen_model").main() > 1


def test_gemma_model_decodes_several_tokens_per_call():
    """Its logits, which `main` checks in every kind of call, are those of the package's own call."""
    pytest.importorskip("kauldron", reason="needs: pip install gemma tensorflow-cpu")
    pytest.importorskip("gemma", reason="needs: pip install gemma tensorflow-cpu")
    example = _module("gemma_model")
    assert example.main() > 1
    model = example.model(0)
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 1, 50)
    positions = np.broadcast_to(np.arange(16), tokens.shape)
    visible = np.broadcast_to(np.tri(16, dtype=bool), (2, 16, 16))
    logits, _ = model.extend(tokens, positions, visible)
    expected = example.DECODER.apply(model.params, tokens).logits
    np.testing.assert_allclose(logits, expected, atol=1e-5)


@pytest.mark.slow
def test_prompt_padding_past_the_context_changes_no_tokens():
    """Flax embeds positions past the context as NaN, and an attention weight of 0 keeps the NaN."""
    target, draft = (
        _module("own_model").Attention(50, 32, context, seed=0) for context in (20, 14)
    )
    arguments = jax.random.key(0), get_method("speculative", draft_length=2), target, draft
    narrow = generate(*arguments, np.ones((2, 10), np.int32), [10, 3], 10)
    wide = generate(*arguments, np.ones((2, 64), np.int32), [10, 3], 10)
    np.testing.assert_array_equal(narrow.tokens[:, :20], wide.tokens[:, :20])
    assert np.all(np.asarray(wide.tokens)[0, :20] >= 0)
    assert int(wide.target_calls[1]) < 10


def test_policy_gradient_raises_the_reward():
    first, last, apart = _module("policy_gradient").main(steps=12)
    assert last > first + 0.1 and apart < 1e-4


@pytest.mark.slow
def test_train_draft_raises_tokens_per_call():
    before, after = _module("train_draft").main(steps=25)
    assert after > before + 0.2
