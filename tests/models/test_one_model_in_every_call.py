"""The logits of an int8 model do not depend on the width of a call.

So greedy decoding equals the baseline, token for token. With the CPU kernels the bits are equal.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from spectr_jax import Policy, generate, get_method, load
from spectr_jax.loading.by_name import EMBEDDED, SMOLLM2_PACKAGE
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers import cpu
from spectr_jax.models.quantized import quantize
from spectr_jax.models.transformer import Transformer, TransformerConfig

PAIRS = {"embedded": ("20m", "2m"), "smollm2": ("smollm2", "smollm2-draft")}
METHODS = {
    "block": {"draft_length": 8},
    "spectr": {"num_drafts": 2, "draft_length": 3},
    "otm_layer": {"tree": "2,1,1"},
    "traversal": {"tree": "2,2"},
    "ersd": {"tree": "3,1"},
}
"""A method of each kind of verifier, with calls on four to nine tokens."""


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
    """Compares one call, calls on nine tokens and on one, for one sequence and for two."""
    if kernels and not cpu.kernels():
        pytest.skip("the CPU kernels are not in use")
    if not kernels:
        monkeypatch.setattr(cpu, "kernels", lambda: False)
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
            assert np.max(distances) < 1e-4  # In total variation.
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

    def tokens(method, *pair):
        out = generate(
            jax.random.key(0), method, *pair, prompts, lengths, new_tokens, Policy(temperature=0.0)
        )
        return [
            row[:length].tolist()
            for row, length in zip(np.asarray(out.tokens), out.lengths, strict=True)
        ]

    expected = tokens(get_method("baseline"), models[0], None)
    names = METHODS if pair == "embedded" else ("block", "otm_layer")
    found = {name: tokens(get_method(name, **METHODS[name]), *models) for name in names}
    assert [name for name in found if found[name] != expected] == []


PROGRAM = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from test_one_model_in_every_call import _load, _logits_in_calls_of, freeze
model = _load("embedded")
frozen, tokens = freeze(model), np.random.default_rng(2).integers(0, model.vocab_size, (1, 36))
alone = _logits_in_calls_of(1, frozen, tokens)
for width in (9, 36):
    np.testing.assert_array_equal(_logits_in_calls_of(width, frozen, tokens), alone)
"""


@pytest.mark.skipif(not cpu.kernels(), reason="the CPU kernels are not in use")
def test_nor_in_a_process_whose_programs_are_optimized():
    """XLA's norms depend on the width with its default options, which tests/conftest.py replaces."""
    theirs = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "NPROC")
    environment = {name: value for name, value in os.environ.items() if name not in theirs}
    program = [sys.executable, "-c", PROGRAM, str(pathlib.Path(__file__).parent)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
