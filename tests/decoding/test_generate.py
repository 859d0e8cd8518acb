"""`generate` and `decode` on transformers, and the arguments that they refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import Policy, bias, decode, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError

KEY = jax.random.key(0)
PROMPTS = np.random.default_rng(0).integers(0, 13, (8, 5)), np.array([1, 2, 3, 4, 5, 5, 1, 2])


def _transformer(seed, layers=2):
    shape = {"width": 16, "mlp": 32, "heads": 2, "vocab_size": 13, "context": 32}
    return Transformer(TransformerConfig(layers=layers, **shape), rngs=nnx.Rngs(seed))


def test_a_greedy_model_accepts_all_its_own_drafts():
    """This holds only if both caches have the rows that a forward pass would have written."""
    model = _transformer(0)
    prompts, lengths = np.random.default_rng(0).integers(0, 13, (4, 5)), np.array([1, 2, 4, 5])
    method = get_method("spectr", num_drafts=2, draft_length=3)
    result = generate(KEY, method, model, model, prompts, lengths, 24, Policy(temperature=0.0))
    np.testing.assert_array_equal(result.target_calls, 24 // 4)


@pytest.mark.slow
def test_self_speculation_equals_a_separate_draft_of_its_layers():
    """Tokens and calls are equal, although self-speculation shares the target's cache."""

    class FirstOne(Transformer):
        def extend(self, *args, **kwargs):
            return super().extend(*args, **{**kwargs, "layers": 1})

    target, draft = _transformer(0), _transformer(0)
    draft.__class__ = FirstOne
    shared = get_method("self_speculative", layers=1, method="otm_block", tree="2,2,1")
    apart = get_method("otm_block", tree="2,2,1")
    ours = generate(KEY, shared, target, None, *PROMPTS, 20)
    theirs = generate(KEY, apart, target, draft, *PROMPTS, 20)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert np.sum(ours.target_calls) < np.sum(ours.lengths - PROMPTS[1])


TABLE = TableModel(random_table(0, 5), context=16)
OTHER = TableModel(random_table(0, 6), context=16)
SPECTR = get_method("spectr", num_drafts=2, draft_length=2)
BASELINE = get_method("baseline")


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [("gsd", {"tree": "batch:6"}, "has 6 children"), ("self_speculative", {}, "layers=1")],
)
def test_a_method_that_does_not_fit_the_models_is_refused(method, options, message):
    with pytest.raises(UserError, match=message):
        generate(KEY, get_method(method, **options), TABLE, TABLE, [[1]], [1], 4)


@pytest.mark.parametrize(
    ("draft", "prompts", "lengths", "new", "message"),
    [
        (TABLE, [[1] * 10], [10], 7, "max_new_tokens=7: 17 tokens exceed the context 16"),
        (TABLE, [[1, 1]], [3], 4, r"prompt_lengths=\[3\]"),
        (TABLE, [[1, 1]], [0], 4, r"prompt_lengths=\[0\]"),
        (TABLE, [[1, 5]], [2], 4, r"outside 0\.\.4"),
        (TABLE, [1, 1], [1, 1], 4, r"shapes \[B, T\] and \[B\]"),
        (TABLE, [[1]], [1], 0, "max_new_tokens=0"),
        (TABLE, [[1]], [1], 4.0, "max_new_tokens=4.0"),
        (TABLE, [[1.9, 2.2]], [1], 4, "prompts: must be integers, not float64"),
        (TABLE, [[1], [1, 2]], [1, 2], 4, "prompts: the rows have unequal lengths"),
        (OTHER, [[1]], [1], 4, "draft: has 6 tokens, but the target has 5"),
        (None, [[1]], [1], 4, "method 'spectr': needs a draft model.* 'recycle'"),
    ],
)
def test_invalid_prompts_lengths_and_drafts_are_refused(draft, prompts, lengths, new, message):
    with pytest.raises(UserError, match=message):
        generate(KEY, SPECTR, TABLE, draft, prompts, lengths, new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": jax.random.PRNGKey(0)}, r"key=uint32\[2\]: must be a single typed key"),
        ({"key": 7}, "key=7"),
        ({"key": jax.random.key(0, impl="rbg")}, r"key=key<rbg>: sequences would share"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, r"key=key<fry>\[3\]"),
        ({"mesh": jax.make_mesh((1,), ("x",))}, r"mesh: has axes \('x',\)"),
        ({"method": "speculative"}, "method='speculative'"),
    ],
)
def test_bad_keys_meshes_and_methods_are_refused(change, message):
    given = {"key": KEY, "mesh": None, "method": SPECTR, "target": TABLE, "draft": TABLE, **change}
    with pytest.raises(UserError, match=message):
        generate(**given, prompts=[[1], [1]], prompt_lengths=[1, 1], max_new_tokens=4)


@pytest.mark.slow
def test_a_mesh_does_not_change_sequences():
    policy = Policy([1.0, 0.0, 0.5, 1.0], top_k=[0, 3, 4, 0], process=bias({3: 2.0}))
    rows = [[1, 2]] * 4, [2, 1, 2, 1], 8, policy
    options = {"stop": [[3, 4]], "logprobs": True}
    alone, spread = (
        generate(KEY, SPECTR, TABLE, TABLE, *rows, mesh=mesh, **options)
        for mesh in (None, sharding.make_mesh())
    )
    jax.tree.map(np.testing.assert_array_equal, alone, spread)


def test_observed_booleans_are_counted():
    def observe(call):
        return {"several": call.chosen.emitted > 1, "calls": jnp.ones((), jnp.int32)}

    result = generate(KEY, SPECTR, TABLE, TABLE, [[1]] * 4, [1] * 4, 8, observe=observe)
    assert result.observed["several"].dtype == jnp.int32
    np.testing.assert_array_equal(result.observed["calls"], result.target_calls)
    several = result.emitted_per_call[:, 2:].sum(axis=1)
    np.testing.assert_array_equal(result.observed["several"], several)


def test_prompts_padded_to_one_bucket_share_a_program(count_compilations):
    models = TableModel(random_table(0, 5)), TableModel(random_table(1, 5))
    method, tokens = get_method("otm_block", tree="2,1"), []
    for length in (3, 16):
        prompts = np.ones((2, length), np.int32)
        with count_compilations() as compiled:
            tokens.append(np.asarray(generate(KEY, method, *models, prompts, [3, 2], 6).tokens))
    assert not compiled
    np.testing.assert_array_equal(*tokens)


def test_limits_within_one_bucket_share_a_program(count_compilations):
    models = TableModel(random_table(0, 5)), TableModel(random_table(1, 5))
    method, outs = get_method("otm_block", tree="2,1"), []
    for limit in (16, 1, 7):
        with count_compilations() as compiled:
            outs.append(generate(KEY, method, *models, [[1], [2]], [1, 1], limit))
        np.testing.assert_array_equal(outs[-1].lengths, 1 + limit)
        tokens = np.asarray(outs[0].tokens)
        expected = np.where(np.arange(tokens.shape[1]) < 1 + limit, tokens, 0)
        np.testing.assert_array_equal(outs[-1].tokens, expected)
        assert limit == 16 or not compiled


def test_decode_inside_jit_equals_generate(count_compilations):
    """Models, keys and temperature are arguments of the jitted function, so new values compile
    nothing."""
    target, draft, *others = (freeze(TableModel(random_table(seed, 13))) for seed in range(4))
    method = get_method("speculative", draft_length=2)
    prompts = np.random.default_rng(0).integers(0, 13, (4, 16)).astype(np.int32)
    lengths, other_key = np.array([1, 5, 16, 9], np.int32), jax.random.key(4)

    @jax.jit
    def doubled(key, target, draft, prompts, lengths, temperature):
        policy = Policy(temperature=temperature, eos=7)
        out = decode(key, method, target, draft, prompts, lengths, 8, policy)
        return out, 2 * out.lengths

    ours, lengths_twice = doubled(KEY, target, draft, prompts, lengths, 1.0)
    theirs = generate(KEY, method, target, draft, prompts, lengths, 8, Policy(eos=7))
    theirs = dataclasses.replace(theirs, tokens=theirs.tokens[:, : ours.tokens.shape[1]])
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    np.testing.assert_array_equal(lengths_twice, 2 * theirs.lengths)
    with count_compilations() as compiled:
        jax.block_until_ready(doubled(other_key, *others, prompts[::-1], lengths, 0.5))
    assert not compiled


def test_the_output_of_load_is_accepted_as_a_model():
    loaded = Trained("table", TABLE, None)
    first = generate(KEY, SPECTR, loaded, loaded, [[1, 2]], [2], 8).tokens
    second = generate(KEY, SPECTR, TABLE, freeze(loaded), [[1, 2]], [2], 8).tokens
    np.testing.assert_array_equal(first, second)
    with pytest.raises(UserError, match="a list is not a model"):
        generate(KEY, SPECTR, [TABLE], TABLE, [[1]], [1], 4)


def test_a_frozen_model_does_not_follow_later_changes():
    target = TableModel(random_table(0, 5))
    frozen = freeze(target)

    def tokens(model):
        return np.asarray(generate(KEY, BASELINE, model, None, [[1, 2]], [2], 12).tokens)

    before = tokens(target)
    target.tables[0][...] = jnp.asarray(random_table(1, 5), jnp.float32)
    np.testing.assert_array_equal(tokens(frozen), before)
    assert not np.array_equal(tokens(target), before)
    assert freeze(frozen) is frozen
