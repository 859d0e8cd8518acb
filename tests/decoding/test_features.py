"""Drafts that see the target's features: each drafts from what it would have without a cache, and outputs are exact."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from spectr_jax.decoding import Policy, get_method, stream
from spectr_jax.decoding.generate import generate
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import quantize
from spectr_jax.models.table import TableModel
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.models.vocabulary import Kept
from spectr_jax.utils.errors import UserError

WIDTH, VOCABULARY, CONTEXT = 16, 11, 96
DRAFT = LlamaConfig(
    layers=2,
    width=WIDTH,
    mlp=24,
    heads=4,
    kv_heads=2,
    head_width=4,
    vocab_size=VOCABULARY,
    context=CONTEXT,
    embed_rank=4,
    head_tokens=9,
    features=WIDTH,
)


@pytest.fixture(scope="module")
def draft():
    return Llama(DRAFT, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def deep_draft():
    """Also sees the output of its target's first layer, twice."""
    made = Llama(dataclasses.replace(DRAFT, feature_layers=(1, 1)), rngs=nnx.Rngs(1))
    made.fuse.kernel[...] = jax.random.normal(jax.random.key(0), made.fuse.kernel.shape)
    made.norms_fuse[1].scale[...] *= 2
    return made


def llama_target():
    shape = LlamaConfig(2, WIDTH, 24, 4, 2, 4, VOCABULARY, CONTEXT, tied=True)
    model = Llama(shape, rngs=nnx.Rngs(0))
    model.embed.embedding[...] *= 50
    return model


def our_target():
    shape = TransformerConfig(
        layers=1, width=WIDTH, mlp=32, heads=2, vocab_size=VOCABULARY, context=CONTEXT
    )
    return Transformer(shape, rngs=nnx.Rngs(0))


TARGETS = {"llama": llama_target, "ladder": our_target}


def on_whole_texts(model, tokens_BxT, features_BxTxE=None, **options):
    """What the head of a model scores [B, T, E] in one call without a cache."""
    B, T = tokens_BxT.shape
    place = tokens_BxT, jnp.broadcast_to(jnp.arange(T), (B, T)), causal(jnp.zeros((B, T)))
    options |= {} if features_BxTxE is None else {"features_BxNxE": features_BxTxE}
    return model.hidden(*place, **options)[0]


def seen_of(target, draft, tokens_BxT):
    """What a draft sees of the target at each token [B, T, E], in the space of its own features."""
    last = on_whole_texts(target, tokens_BxT)
    if not draft.feature_layers:
        return last
    output = on_whole_texts(target, tokens_BxT, also=(1,))[..., WIDTH:]
    normed = output / jnp.sqrt(jnp.mean(output**2, axis=-1, keepdims=True) + DRAFT.norm_epsilon)
    return last + normed @ draft.fuse.kernel[:WIDTH] + 2 * normed @ draft.fuse.kernel[WIDTH:]


@functools.partial(jax.jit, static_argnums=2)
def expected_pmf(target, draft, drafted, tokens_T, length):
    """p [V] behind a text whose last `drafted` tokens are drafts; what is at and behind `length` does not count."""
    target, draft = target.merge(), draft.merge()
    shown = seen_of(target, draft, tokens_T[None])
    seen = jnp.pad(shown, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    for back in range(drafted, -1, -1):
        own = on_whole_texts(draft, tokens_T[None], seen)
        if (
            back
        ):  # The token after `length - 1 - back` is drafted: the draft's own features come with it.
            seen = seen.at[0, length - back].set(own[0, length - 1 - back])
    return jax.nn.softmax(draft.scored(own)[0, length - 1])


def _seen(call):
    return call.scored.tokens, call.scored.p, call.scored.length


@pytest.mark.parametrize(
    ("kind", "sees", "prompt", "tree"),
    [
        ("llama", "draft", 1, "2,2,1"),
        ("llama", "deep_draft", 3, "2,2,1"),
        pytest.param("llama", "draft", 3, "2,2,1", marks=pytest.mark.slow),
        pytest.param("llama", "draft", 1, "chain:3", marks=pytest.mark.slow),
        pytest.param("llama", "draft", 3, "chain:3", marks=pytest.mark.slow),
        pytest.param("llama", "deep_draft", 1, "chain:3", marks=pytest.mark.slow),
        ("ladder", "draft", 3, "3x1"),
        pytest.param("ladder", "deep_draft", 3, "3x1", marks=pytest.mark.slow),
        pytest.param("llama", "draft", 70, "2,2,1", marks=pytest.mark.slow),
        pytest.param("llama", "deep_draft", 70, "2,2,1", marks=pytest.mark.slow),
    ],
)
def test_each_node_is_drafted_from_what_a_whole_text_gives(request, kind, sees, prompt, tree):
    """Behind prompts of one token, of fewer than a call recalls, and of two pieces; call after call."""
    draft = request.getfixturevalue(sees)
    target, method = TARGETS[kind](), get_method("otm_block", tree=tree)
    models = freeze(target), freeze(draft)
    text = np.random.default_rng(0).integers(0, VOCABULARY, prompt).tolist()
    emitted = 0
    for number, step in enumerate(
        stream(jax.random.key(prompt), method, *models, text, 12, observe=_seen)
    ):
        tokens, p, length = (np.asarray(part) for part in step.observed)
        assert length == len(text) and tokens[0] == text[-1]
        for index, node in enumerate(method.tree.inner):
            path = tokens[np.flatnonzero(method.tree.ancestors[node])[1:]].tolist()
            whole = np.zeros(96 if prompt == 70 else 24, np.int32)
            whole[: length + len(path)] = text + path
            pmf = expected_pmf(*models, len(path), whole, length + len(path))
            np.testing.assert_allclose(
                p[index], pmf, atol=2e-5, err_msg=f"call {number}, node {node}"
            )
        text += step.tokens
        emitted += len(step.tokens)
    assert emitted == 12 and number > 1


@pytest.mark.optimized
@pytest.mark.parametrize("sees", ["draft", "deep_draft"])
def test_outputs_are_the_targets(request, sees):
    """Two tokens behind two prompts against their exact distribution; the draft's temperature is its own."""
    draft = request.getfixturevalue(sees)
    target, prompts = llama_target(), np.array([[3, 1, 4, 0], [2, 0, 0, 0]])
    lengths, draws = np.array([3, 1]), 10_000
    rows = np.repeat(np.arange(2), draws)
    made = generate(
        jax.random.key(0),
        get_method("spectr", tree="2,1"),
        target,
        draft,
        prompts[rows],
        lengths[rows],
        2,
        Policy(top_k=4),
        draft_policy=Policy(temperature=0.8),
    )
    calls = np.asarray(made.target_calls)
    assert 1 < calls.mean() < 2
    for row in range(2):
        exact = np.zeros((VOCABULARY, VOCABULARY))
        whole = np.zeros((VOCABULARY, 5), np.int32)
        whole[:, : lengths[row]] = prompts[row, : lengths[row]]
        whole[:, lengths[row]] = np.arange(VOCABULARY)
        logits = np.asarray(target.scored(on_whole_texts(target, jnp.asarray(whole))), np.float64)
        first, second = (
            _top_four(part) for part in (logits[:1, lengths[row] - 1], logits[:, lengths[row]])
        )
        exact = first[0][:, None] * second
        ends = np.asarray(made.tokens)[rows == row][:, lengths[row] : lengths[row] + 2]
        counts = np.zeros_like(exact)
        np.add.at(counts, tuple(ends.T), 1)
        assert counts[exact == 0].sum() == 0
        assert scipy.stats.chisquare(counts[exact > 0], draws * exact[exact > 0]).pvalue > 1e-3


def _top_four(logits_BxV):
    kept = logits_BxV >= np.sort(logits_BxV, axis=-1)[:, -4:-3]
    weights = np.where(kept, np.exp(logits_BxV - logits_BxV.max(-1, keepdims=True)), 0)
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("quantized", [False, True])
def test_greedy_outputs_are_the_targets(deep_draft, quantized):
    """A draft of several layers' features, also in int8."""
    target, draft = our_target(), quantize(deep_draft) if quantized else deep_draft
    prompts, lengths, greedy = (
        np.array([[3, 1, 4], [2, 7, 0]]),
        np.array([3, 2]),
        Policy(temperature=0.0),
    )
    expected = generate(
        jax.random.key(0), get_method("baseline"), target, None, prompts, lengths, 12, greedy
    )
    made = generate(
        jax.random.key(0),
        get_method("block", draft_length=3),
        target,
        draft,
        prompts,
        lengths,
        12,
        greedy,
    )
    np.testing.assert_array_equal(made.tokens, expected.tokens)


def test_a_new_draft_of_several_layers_begins_as_one_of_the_last_layer():
    deep, plain = (
        Llama(dataclasses.replace(DRAFT, feature_layers=layers), rngs=nnx.Rngs(1))
        for layers in ((2, 1), ())
    )
    common = nnx.state(plain, (nnx.Param, Kept))
    nnx.update(deep, common)
    tokens = jnp.arange(8)[None] % VOCABULARY
    features = on_whole_texts(llama_target(), tokens, also=(2, 1))
    np.testing.assert_array_equal(
        on_whole_texts(deep, tokens, features), on_whole_texts(plain, tokens, features[..., :WIDTH])
    )


@pytest.mark.slow
def test_rows_do_not_influence_each_other(draft):
    target, method = llama_target(), get_method("otm_block", tree="2,2,1")
    prompts, lengths = (
        np.random.default_rng(1).integers(0, VOCABULARY, (4, 6)),
        np.array([1, 6, 3, 2]),
    )
    keys = jax.random.split(jax.random.key(0), 4)
    together = generate(keys, method, target, draft, prompts, lengths, 10)
    for row in range(4):
        one = slice(row, row + 1)
        alone = generate(keys[one], method, target, draft, prompts[one], lengths[one], 10)
        np.testing.assert_array_equal(together.tokens[row], alone.tokens[0])
        assert together.target_calls[row] == alone.target_calls[0]


class Narrow(Transformer):
    """A target of someone's own, whose features are bfloat16."""

    def hidden(self, *args, **kwargs):
        hidden, cache = super().hidden(*args, **kwargs)
        return hidden.astype(jnp.bfloat16), cache


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.filterwarnings(
    "ignore:scatter inputs have incompatible types:FutureWarning"
)  # Of walks, with x64.
def test_dtypes_of_models_and_machine(draft, x64):
    shape = TransformerConfig(
        layers=1, width=WIDTH, mlp=32, heads=2, vocab_size=VOCABULARY, context=CONTEXT
    )
    target, prompt = Narrow(shape, rngs=nnx.Rngs(0)), np.ones((1, 20), np.int32)
    with jax.enable_x64(x64):
        made = generate(
            jax.random.key(0),
            get_method("speculative", draft_length=2),
            target,
            draft,
            prompt,
            [20],
            6,
        )
    assert made.lengths == 26


def test_the_head_scores_one_node_of_those_that_are_run_again(draft):
    """Of the tokens that the last call added the draft needs the last one's logits alone."""
    scored = []

    class Counting(Llama):
        def scored(self, x):
            scored.append(x.shape[1])
            return super().scored(x)

    counting = Counting(DRAFT, rngs=nnx.Rngs(1))
    generate(
        jax.random.key(0),
        get_method("block", draft_length=5),
        our_target(),
        counting,
        [[1, 2]],
        [2],
        4,
    )
    assert scored and max(scored[1:]) == 1  # The first is of the prompt, and not computed.


def test_what_is_refused(draft):
    method, prompts = get_method("speculative", draft_length=2), ([[1]], [1])
    wider = Llama(LlamaConfig(1, 20, 24, 4, 2, 4, VOCABULARY, CONTEXT), rngs=nnx.Rngs(0))
    with pytest.raises(
        UserError, match="the draft sees 16 features of its target, and this target shows 20"
    ):
        generate(jax.random.key(0), method, wider, draft, *prompts, 2)
    with pytest.raises(
        UserError, match="the draft sees layer 5 of its target, and this target has 2"
    ):
        deep = Llama(dataclasses.replace(DRAFT, feature_layers=(1, 5)), rngs=nnx.Rngs(1))
        generate(jax.random.key(0), method, llama_target(), deep, *prompts, 2)
    with pytest.raises(
        UserError, match=r"feature_layers=\(0, 1\): must be layers of the target, from 1"
    ):
        dataclasses.replace(DRAFT, feature_layers=[0, 1])
    with pytest.raises(
        UserError, match="this model sees the features of a target, and here are none"
    ):
        generate(jax.random.key(0), get_method("baseline"), draft, None, *prompts, 2)
    with pytest.raises(UserError, match="features=8 is not width=16"):
        LlamaConfig(1, 16, 24, 4, 2, 4, VOCABULARY, CONTEXT, features=8)
    baseline = generate(
        jax.random.key(0),
        get_method("baseline"),
        TableModel(np.full((11,) * 3, 1 / 11)),
        draft,
        *prompts,
        2,
    )
    assert baseline.lengths == 3, "a target that shows nothing decodes without drafts"
