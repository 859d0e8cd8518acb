"""Generation on the transformer, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import Policy, decode, get_method
from spectr_jax.decoding.generate import generate
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils.errors import UserError


def _transformer(seed, **changes):
    shape = {
        "layers": 2,
        "width": 16,
        "mlp": 32,
        "heads": 2,
        "vocab_size": 13,
        "context": 32,
        **changes,
    }
    return Transformer(TransformerConfig(**shape), rngs=nnx.Rngs(seed))


def test_greedy_equals_the_baseline_on_a_transformer():
    target, draft = _transformer(0), _transformer(1, layers=1)
    rng = np.random.default_rng(0)
    prompts, lengths = rng.integers(0, 13, (8, 5)), np.array([1, 2, 3, 4, 5, 5, 1, 2])
    policy = Policy(temperature=0.0, eos=7)
    baseline, *methods = (
        get_method("baseline"),
        get_method("spectr", tree="1x4"),
        get_method("spectr", tree="3x2"),
    )
    expected = generate(
        jax.random.key(0), baseline, target, draft, prompts, lengths, 20, policy
    ).tokens
    for method in methods:
        tokens = generate(
            jax.random.key(0), method, target, draft, prompts, lengths, 20, policy
        ).tokens
        np.testing.assert_array_equal(tokens, expected)


def test_greedy_with_itself_as_draft_accepts_everything():
    """Only if every accepted row of both caches is what a fresh forward would have written."""
    model = _transformer(0)
    prompts, lengths = np.random.default_rng(0).integers(0, 13, (4, 5)), np.array([1, 2, 4, 5])
    method = get_method("spectr", num_drafts=2, draft_length=3)
    result = generate(
        jax.random.key(0), method, model, model, prompts, lengths, 24, Policy(temperature=0.0)
    )
    np.testing.assert_array_equal(result.target_calls, 24 // 4)


@pytest.mark.slow
def test_self_speculation_equals_its_layers_as_a_draft_of_their_own():
    """The same text and as many calls, though the draft's keys and values are the target's."""

    class FirstOne(Transformer):
        def extend(self, *args, **kwargs):
            return super().extend(*args, **{**kwargs, "layers": 1})

    target, draft = _transformer(0), _transformer(0)
    draft.__class__ = FirstOne
    prompts, lengths = (
        np.random.default_rng(0).integers(0, 13, (8, 5)),
        np.array([1, 2, 3, 4, 5, 5, 1, 2]),
    )
    shared = get_method("self_speculative", layers=1, method="otm_block", tree="2,2,1")
    apart = get_method("otm_block", tree="2,2,1")
    results = [
        generate(jax.random.key(0), method, target, own, prompts, lengths, 20)
        for method, own in ((shared, None), (apart, draft))
    ]
    for ours, theirs in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.sum(results[0].target_calls) < np.sum(results[0].lengths - lengths)


TABLE = TableModel(random_table(0, 5), context=16)
OTHER = TableModel(random_table(0, 6), context=16)
SPECTR = get_method("spectr", num_drafts=2, draft_length=2)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (
            "gsd",
            {"tree": "batch:6"},
            "method 'gsd' has nodes with 6 children, and the vocabulary 5 distinct tokens",
        ),
        ("self_speculative", {}, "the target has one layer, and no earlier one to draft with"),
    ],
)
def test_a_method_that_does_not_fit_the_models(method, options, message):
    with pytest.raises(UserError, match=message):
        generate(jax.random.key(0), get_method(method, **options), TABLE, TABLE, [[1]], [1], 4)


@pytest.mark.parametrize(
    ("draft", "prompts", "lengths", "new", "policy", "message"),
    [
        (
            TABLE,
            [[1] * 10],
            [10],
            7,
            Policy(),
            "prompts of 10 tokens and max_new_tokens=7 exceed the target's context of 16",
        ),
        (TABLE, [[1, 1]], [3], 4, Policy(), r"prompt lengths \[3\] are not within 1..2"),
        (TABLE, [[1, 1]], [0], 4, Policy(), r"prompt lengths \[0\] are not within 1..2"),
        (TABLE, [[1, 5]], [2], 4, Policy(), "a prompt has a token outside 0..4"),
        (TABLE, [1, 1], [1, 1], 4, Policy(), r"give \[B, T\] and \[B\]"),
        (TABLE, [[1]], [1], 0, Policy(), "max_new_tokens=0 is less than 1"),
        (OTHER, [[1]], [1], 4, Policy(), "the draft has 6 tokens and the target 5"),
        (None, [[1]], [1], 4, Policy(), "method 'spectr' drafts, but no draft model was given"),
        (
            TABLE,
            [[1]],
            [1],
            4,
            Policy(temperature=-1.0),
            "temperature=-1.0: is not a finite number",
        ),
        (
            TABLE,
            [[1]],
            [1],
            4,
            Policy(temperature=float("nan")),
            "temperature=nan: is not a finite number",
        ),
        (TABLE, [[1]], [1], 4, Policy(top_p=0.0), r"top_p=0.0: is not in \(0, 1\]"),
        (TABLE, [[1]], [1], 4, Policy(top_k=-1), "top_k=-1: must be a non-negative integer"),
        (TABLE, [[1]], [1], 4, Policy(top_k=2.5), "top_k=2.5: must be a non-negative integer"),
        (
            TABLE,
            [[1]],
            [1],
            4,
            Policy(eos=[[3, 4]]),
            r"eos=\[\[3, 4\]\] is no token; give its number",
        ),
        (TABLE, [[1]], [1], 4, Policy(eos=2.7), "eos=2.7 is no token"),
        (TABLE, [[1]], [1], 4, Policy(eos=None), "eos=None is no token"),
        (TABLE, [[1]], [1], 4.0, Policy(), "max_new_tokens=4.0 is not a whole number"),
        (TABLE, [[1.9, 2.2]], [1], 4, Policy(), "prompts are float64 and not whole numbers"),
        (
            TABLE,
            [[1], [1, 2]],
            [1, 2],
            4,
            Policy(),
            "prompts are rows of several lengths; pad them",
        ),
    ],
)
def test_bad_input(draft, prompts, lengths, new, policy, message):
    with pytest.raises(UserError, match=message):
        generate(jax.random.key(0), SPECTR, TABLE, draft, prompts, lengths, new, policy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"key": jax.random.PRNGKey(0)},
            r"key is uint32\[2\]; give jax.random.key\(seed\), or 2 typed keys, one per sequence",
        ),
        ({"key": 7}, "key is 7; give jax.random.key"),
        (
            {"key": jax.random.split(jax.random.key(0), 3)},
            r"key is key<fry>\[3\]; give jax.random.key\(seed\), or 2 typed keys",
        ),
        (
            {"mesh": jax.make_mesh((1,), ("x",))},
            r"mesh has axes \('x',\) of .*; give one of `sharding.make_mesh`",
        ),
    ],
)
def test_bad_keys_and_meshes(change, message):
    arguments = {"key": jax.random.key(0), "mesh": None, **change}
    with pytest.raises(UserError, match=message):
        generate(
            arguments["key"], SPECTR, TABLE, TABLE, [[1], [1]], [1, 1], 4, mesh=arguments["mesh"]
        )


def test_a_name_is_no_method():
    with pytest.raises(
        UserError, match="method='speculative' is no Method; give one of `get_method`"
    ):
        generate(jax.random.key(0), "speculative", TABLE, TABLE, [[1]], [1], 4)


def test_truth_values_that_are_observed_are_counted():
    seen = {
        "observe": lambda call: {
            "several": call.chosen.emitted > 1,
            "calls": 1 * jnp.ones((), jnp.int32),
        }
    }
    result = generate(jax.random.key(0), SPECTR, TABLE, TABLE, [[1]] * 4, [1] * 4, 8, **seen)
    assert result.observed["several"].dtype == jnp.int32
    np.testing.assert_array_equal(result.observed["calls"], result.target_calls)
    np.testing.assert_array_equal(
        result.observed["several"], result.emitted_per_call[:, 2:].sum(axis=1)
    )


def test_prompts_of_a_bucket_share_a_program(count_compilations):
    models, method = (
        (TableModel(random_table(0, 5)), TableModel(random_table(1, 5))),
        get_method("otm_block", tree="2,1"),
    )
    texts = {}
    for length in (3, 16):
        with count_compilations() as compiled:
            out = generate(
                jax.random.key(0), method, *models, np.ones((2, length), np.int32), [3, 2], 6
            )
        texts[length] = np.asarray(out.tokens)
    assert not compiled
    np.testing.assert_array_equal(texts[3], texts[16])


def test_decode_stands_in_a_jit_of_ones_own(count_compilations):
    """The texts of `generate`, from one program that goes on with them; models, keys and temperature are arguments."""
    target, draft, *others = (freeze(_transformer(seed, layers=1)) for seed in range(4))
    method = get_method("speculative", draft_length=2)
    single, several = jax.random.key(3), jax.random.split(jax.random.key(4), 4)
    prompts, lengths = (
        np.random.default_rng(0).integers(0, 13, (4, 16)).astype(np.int32),
        np.array([1, 5, 16, 9], np.int32),
    )

    @jax.jit
    def twice(keys, target, draft, prompts, lengths, temperature):
        policy = Policy(temperature=temperature, eos=7)
        return [
            (
                out := decode(key, method, target, draft, prompts, lengths, 8, policy),
                2 * out.lengths,
            )
            for key in keys
        ]

    keys = single, several
    for key, (ours, doubled) in zip(
        keys, twice(keys, target, draft, prompts, lengths, 1.0), strict=True
    ):
        theirs = generate(key, method, target, draft, prompts, lengths, 8, Policy(eos=7))
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        np.testing.assert_array_equal(doubled, 2 * theirs.lengths)
    with count_compilations() as compiled:
        jax.block_until_ready(twice(keys, *others, prompts[::-1], lengths, 0.5))
    assert not compiled


def test_what_load_returns_is_taken_as_its_model():
    loaded = Trained("table", TABLE, None)
    first, second = (
        generate(jax.random.key(0), SPECTR, target, draft, [[1, 2]], [2], 8).tokens
        for target, draft in ((loaded, loaded), (TABLE, freeze(loaded)))
    )
    np.testing.assert_array_equal(first, second)
    with pytest.raises(
        UserError,
        match=r"a list is no model; give an nnx.Module, `freeze` of one, or what `load` returns",
    ):
        generate(jax.random.key(0), SPECTR, [TABLE], TABLE, [[1]], [1], 4)


def test_a_frozen_model_decodes_as_it_was_when_frozen():
    target = TableModel(random_table(0, 5))
    frozen = freeze(target)
    arguments = ([[1, 2]], [2], 12)
    before = generate(jax.random.key(0), get_method("baseline"), target, None, *arguments).tokens
    target.tables[0][...] = jnp.asarray(random_table(1, 5), jnp.float32)
    np.testing.assert_array_equal(
        generate(jax.random.key(0), get_method("baseline"), frozen, None, *arguments).tokens, before
    )
    changed = generate(jax.random.key(0), get_method("baseline"), target, None, *arguments).tokens
    assert not np.array_equal(changed, before)
    assert freeze(frozen) is frozen
