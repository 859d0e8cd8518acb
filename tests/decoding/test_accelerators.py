"""Programs for accelerators, traced or run on a CPU: a call never waits for the host, and its
tokens equal those of the program for CPUs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from spectr_jax.decoding import METHODS, Policy, decode, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.running import run_on_prompts
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers import attention
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils import backend

OPEN_LOOPS = {"spectr+", "spectr++"}
"""Methods whose linear programs iterate until they converge."""
REPEATED = {"spectr", "kseq_gamma", "naive", "recursive", "spectr+", "otm", "gbv_conditional"}
"""Methods whose verifier a quick case also uses."""


@functools.cache
def _transformer(seed, layers):
    shape = {"vocab_size": 100, "width": 16, "mlp": 32, "heads": 2, "layers": layers, "context": 64}
    return freeze(Transformer(TransformerConfig(**shape), rngs=nnx.Rngs(seed)))


@functools.cache
def _llama(seed):
    shape = {"vocab_size": 100, "width": 16, "mlp": 32, "heads": 2, "kv_heads": 1, "head_width": 8}
    return freeze(Llama(LlamaConfig(**shape, layers=2, context=64), rngs=nnx.Rngs(seed)))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in METHODS],
)
def test_a_call_never_waits_for_the_host(name, monkeypatch):
    """The loop of `generate` contains no conditional and no loop of unknown length, except for the
    methods in `OPEN_LOOPS`."""
    method, policy = get_method(name), Policy(0.7, top_k=5)
    models = _transformer(0, 2), _transformer(1, 1) if method.needs_draft else None
    monkeypatch.setattr(backend, "on_cpu", lambda: False)
    jax.clear_caches()

    def decoded(key, target, draft, prompts, lengths):
        return decode(key, method, target, draft, prompts, lengths, 20, policy)

    arguments = jax.random.key(0), *models, np.ones((2, 5), np.int32), np.full(2, 5)
    loops = _loops(jax.make_jaxpr(decoded)(*arguments).jaxpr)
    stops = [list(_stops(each.params["body_jaxpr"].jaxpr)) for each in loops]
    assert stops and any(stops) == (name in OPEN_LOOPS)


@pytest.mark.parametrize("tokens", [13, 16])
def test_attention_in_blocks_equals_attention_at_once(tokens, monkeypatch):
    monkeypatch.setattr(backend, "on_cpu", lambda: False)
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.normal(size=(2, length, heads, 8)).astype(np.float32)
        for length, heads in ((tokens, 4), (40, 2), (40, 2))
    )
    mask = rng.random((2, tokens, 40)) < 0.5
    mask[:, :, 0] = True
    whole = attention.attention(q, k, v, mask)
    monkeypatch.setattr(attention, "SCORES", 4 * 2 * 4 * tokens * 40 // 3)  # Three or four blocks.
    blocks = jax.make_jaxpr(attention.attention)(q, k, v, mask)
    assert "scan" in str(blocks)
    np.testing.assert_allclose(attention.attention(q, k, v, mask), whole, atol=1e-6)


@pytest.mark.parametrize(("piece", "slots"), [(1, 512), (20, 512), (200, 624), (1_000, 512)])
def test_the_cache_has_few_more_slots_than_prompts_need(piece, slots):
    """Pieces are multiples of 16 tokens, and equally long."""
    prompts, lengths = np.ones((1, 500), np.int32), np.full(1, 500)
    config = dataclasses.replace(_llama(0).merge().config, context=1_024)
    model = Llama(config, rngs=nnx.Rngs(0))
    cache, _ = jax.eval_shape(lambda: run_on_prompts(model, prompts, lengths, 500, piece=piece))
    assert cache.rows[0][0].shape[1] <= slots


def _loops(jaxpr):
    """Yields the equations of the outermost while loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from _loops(inner)


def _stops(jaxpr):
    """Yields the primitive of each conditional and while loop."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("while", "cond"):
            yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from _stops(inner)


@pytest.mark.parametrize(
    ("rows", "name", "options"),
    [
        (1, "speculative", {"draft_length": 2}),
        pytest.param(1, "lookup", {"tree": "2,1"}, marks=pytest.mark.slow),
        pytest.param(3, "recycle", {"tree": "2,1"}, marks=pytest.mark.slow),
    ],
)
def test_the_accelerator_program_generates_the_tokens_of_the_cpu(rows, name, options, monkeypatch):
    models = _llama(0), _transformer(1, 1)
    prompts = np.random.default_rng(0).integers(0, 100, (rows, 5))
    tokens = []
    for on_cpu in (True, False):
        monkeypatch.setattr(backend, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        jax.clear_caches()
        method, lengths = get_method(name, **options), np.full(rows, 5)
        target, draft = models if method.needs_draft else (models[0], None)
        made = generate(jax.random.key(1), method, target, draft, prompts, lengths, 12)
        tokens.append(np.asarray(made.tokens))
    np.testing.assert_array_equal(*tokens)
