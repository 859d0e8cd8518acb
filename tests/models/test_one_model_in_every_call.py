"""Tests that the logits of an int8 model do not depend on the width (tokens) of a call.

Greedy decoding therefore equals the baseline, token for token. With the CPU kernels, the logits
have equal bits. With its default options, XLA computes norms that depend on the width, so CI runs
this file with these options (scripts/test.sh).
"""

import dataclasses
import importlib.metadata

import jax
import numpy as np
import pytest
from flax import nnx

from spectr_jax import Policy, generate, get_method, load
from spectr_jax.loading.by_name import SMOLLM2_PACKAGE
from spectr_jax.models.formats.published import EMBEDDED
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers import cpu
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import Transformer, TransformerConfig

pytestmark = pytest.mark.defaults
PAIRS = {"embedded": ("20m", "2m"), "smollm2": ("smollm2", "smollm2-draft")}
METHODS = {
    "embedded": get_method("block", draft_length=8),
    "smollm2": get_method("otm_layer", tree="2,1,1"),
}
"""A chain and a tree of drafts. The target scores nine and seven tokens in a call."""


def _installed(package: str) -> bool:
    return any(found.name == package for found in importlib.metadata.distributions())


def _logits_in_calls_of(width, frozen, tokens):
    extend = jax.jit(lambda frozen, *arguments: frozen.merge().extend(*arguments))
    cache, found = frozen.merge().init_cache(*tokens.shape), []
    for first in range(0, tokens.shape[1], width):
        new = tokens[:, first : first + width]
        positions = np.broadcast_to(np.arange(first, first + width), new.shape)
        visible = np.broadcast_to(np.tri(width, dtype=bool), (len(new), width, width))
        logits, cache = extend(frozen, new, positions, visible, cache)
        cache = dataclasses.replace(cache, lengths=cache.lengths + width)
        found.append(np.asarray(logits))
    return np.concatenate(found, axis=1)


def _load(name):
    if name == "small":
        shape = TransformerConfig(layers=1, width=64, mlp=256, heads=4, vocab_size=29, context=48)
        return quantize(Transformer(shape, rngs=nnx.Rngs(0)))
    if name == "smollm2" and not _installed(SMOLLM2_PACKAGE):
        pytest.skip(f"{SMOLLM2_PACKAGE} is not installed")
    return load(PAIRS[name][0], "int8").model


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("small", True),
        ("small", False),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in PAIRS),
    ],
)
def test_logits_do_not_depend_on_the_width_of_a_call(name, kernels, monkeypatch):
    """Compares one call on all tokens with calls on nine and on one, for one and two sequences."""
    if kernels and not cpu.kernels_in_use():
        pytest.skip("the CPU kernels are not in use")
    if not kernels:
        monkeypatch.setattr(cpu, "kernels_in_use", lambda: False)
        jax.clear_caches()
    model = _load(name)
    frozen, tokens = freeze(model), np.random.default_rng(2).integers(0, model.vocab_size, (2, 36))
    whole = _logits_in_calls_of(36, frozen, tokens)
    for width in (9, 1):
        for found in (
            _logits_in_calls_of(width, frozen, tokens),
            _logits_in_calls_of(width, frozen, tokens[1:]),
        ):
            same = whole[-len(found) :]
            if kernels:
                np.testing.assert_array_equal(found, same)
            distances = np.abs(jax.nn.softmax(found) - jax.nn.softmax(same)).sum(-1) / 2
            assert np.max(distances) < 1e-4  # The limit is on the total variation distance.
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("pair", PAIRS)
def test_greedy_decoding_in_int8_equals_the_baseline(pair):
    if pair == "smollm2" and not _installed(SMOLLM2_PACKAGE):
        pytest.skip(f"{SMOLLM2_PACKAGE} is not installed")
    target, draft = (load(name, "int8") for name in PAIRS[pair])
    models = freeze(target.model), freeze(draft.model)
    sequences, most = (4, 80) if pair == "embedded" else (4, 40)
    prompts, lengths = target.tokenizer.prompts(
        (EMBEDDED / "prompts.txt").read_text().splitlines()[:sequences]
    )
    new_tokens = min(most, target.model.context - prompts.shape[1])

    def tokens(method, *models):
        out = generate(
            jax.random.key(0),
            method,
            *models,
            prompts,
            lengths,
            new_tokens,
            Policy(temperature=0.0),
        )
        return [
            row[:length].tolist()
            for row, length in zip(np.asarray(out.tokens), out.lengths, strict=True)
        ]

    expected = tokens(get_method("baseline"), models[0], None)
    assert tokens(METHODS[pair], *models) == expected
