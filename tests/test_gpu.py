"""Tests that outputs are exact with the arithmetic of a GPU.

Run them with `pytest -m gpu` on a machine with a GPU.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import Policy, generate, get_method, load
from spectr_jax.decoding.methods import METHODS
from spectr_jax.decoding.tree import parse
from spectr_jax.experiments.planning.on_tree import on_tree
from spectr_jax.testing import methods

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "jax.default_backend() == 'cpu' and 'gpu' not in config.option.markexpr",
        reason="needs a GPU",
    ),
]
DTYPES = ("float32", "bfloat16")
PROMPTS = np.random.default_rng(0).integers(3, 280, (4, 8)), np.full(4, 8)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"self_speculative"}))
def test_outputs_follow_the_target_distribution_on_a_gpu(name):
    method = on_tree(name, parse("2,1")) or on_tree(name, parse("2x2")) or get_method(name)
    methods.check_outputs(method, generations=48_000)
    methods.check_greedy(method, seed=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", ["speculative", "block", "spectr", "otm_block", "otm_layer", "gsd"]
)
def test_greedy_decoding_with_drafts_equals_the_baseline(name, dtype):
    """In bfloat16, a call on more tokens may round two nearly equal logits differently. The test
    lets half of the sequences differ."""
    target, draft = load("6m", dtype), load("2m", dtype)
    plain = generate(
        jax.random.key(0), get_method("baseline"), target, None, *PROMPTS, 24, Policy(temperature=0)
    )
    drafted = generate(
        jax.random.key(0), get_method(name), target, draft, *PROMPTS, 24, Policy(temperature=0)
    )
    same = np.asarray(plain.tokens == drafted.tokens).all(axis=1)
    assert same.all() if dtype == "float32" else same.mean() >= 0.5


@pytest.mark.parametrize("name", ["block", "spectr", "otm_layer"])
def test_a_key_gives_the_same_tokens_in_every_process(name):
    code = (
        "import jax, numpy as np; from spectr_jax import *; from tests.test_gpu import PROMPTS;"
        f"out = generate(jax.random.key(3), get_method({name!r}), load('6m'), load('2m'), "
        "*PROMPTS, 16);"
        "print(np.asarray(out.tokens).tolist(), np.asarray(out.target_calls).tolist())"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout and "[" in runs[0].stdout


def test_logits_with_a_cache_match_a_full_forward_pass():
    model = load("6m").model
    tokens = np.random.default_rng(1).integers(3, 280, (2, 12))
    positions, visible = (
        jnp.broadcast_to(jnp.arange(12), (2, 12)),
        jnp.broadcast_to(np.tri(12, dtype=bool), (2, 12, 12)),
    )
    full, _ = model.extend(jnp.asarray(tokens), positions, visible)
    cached, _ = model.extend(jnp.asarray(tokens), positions, visible, model.init_cache(2, 32))
    np.testing.assert_allclose(jax.nn.log_softmax(full), jax.nn.log_softmax(cached), atol=0.02)
