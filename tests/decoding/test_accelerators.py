"""What an accelerator runs, traced or run on a CPU: no stop of the host in a call, and the sequences of a CPU."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from spectr_jax.decoding import METHODS, Policy, decode, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers import cpu
from spectr_jax.models.transformer import Transformer, TransformerConfig

OPEN_LOOPS = {"spectr+", "spectr++"}
"""Their linear programs take as many steps as they need."""


def _transformer(seed, layers):
    shape = {"vocab_size": 100, "width": 16, "mlp": 32, "heads": 2, "layers": layers, "context": 64}
    return Transformer(TransformerConfig(**shape), rngs=nnx.Rngs(seed))


@pytest.mark.parametrize("name", METHODS)
def test_the_host_never_waits_in_a_call(name, monkeypatch):
    """Inside the loop of `generate` there is no conditional, and no loop whose number of turns is unknown."""
    monkeypatch.setattr(cpu, "on_cpu", lambda: False)
    jax.clear_caches()
    models = freeze(_transformer(0, 2)), freeze(_transformer(1, 1))
    run = functools.partial(
        decode, method=get_method(name), max_new_tokens=20, policy=Policy(0.7, top_k=5)
    )
    arguments = jax.random.key(0), *models, np.ones((2, 5), np.int32), np.full(2, 5)

    def decoded(key, target, draft, prompts, lengths):
        return run(key, target=target, draft=draft, prompts=prompts, prompt_lengths=lengths)

    outer = [
        each
        for each in _loops(jax.make_jaxpr(decoded)(*arguments).jaxpr)
        if each.primitive.name == "while"
    ]
    stops = [sorted(_stops(each.params["body_jaxpr"].jaxpr)) for each in outer]
    assert (max(stops, key=len) != []) == (name in OPEN_LOOPS)


def _loops(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from _loops(inner)


def _stops(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("while", "cond"):
            yield equation.primitive.name
        for inner in jaxprs_in_params(equation.params):
            yield from _stops(inner)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("speculative", {"draft_length": 2}),
        pytest.param("otm", {"tree": "2,2"}, marks=pytest.mark.slow),
        pytest.param("block", {"draft_length": 3}, marks=pytest.mark.slow),
        ("otm_layer", {"tree": "2,1"}),
        pytest.param("gbv", {"num_drafts": 2, "draft_length": 2}, marks=pytest.mark.slow),
        pytest.param("traversal", {"tree": "2,1"}, marks=pytest.mark.slow),
        ("baseline", {}),
        ("lookup", {"tree": "2,1"}),
    ],
)
def test_sequences_are_those_of_a_cpu(name, options, rows, monkeypatch):
    models = _transformer(0, 2), _transformer(1, 1)
    prompts = np.random.default_rng(0).integers(0, 100, (rows, 5))
    tokens = []
    for on_cpu in (True, False):
        monkeypatch.setattr(cpu, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        jax.clear_caches()
        made = generate(
            jax.random.key(1), get_method(name, **options), *models, prompts, np.full(rows, 5), 12
        )
        tokens.append(np.asarray(made.tokens))
    np.testing.assert_array_equal(*tokens)
