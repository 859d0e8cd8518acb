"""Draft models that read the target's features: draft probabilities equal those without a cache,
and outputs follow the target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import Policy, get_method, stream
from spectr_jax.decoding.drafters import FeatureModel
from spectr_jax.decoding.generate import generate, lower
from spectr_jax.decoding.running import run_on_prompts
from spectr_jax.models.eagle3 import Eagle3, Eagle3Config
from spectr_jax.models.frozen import freeze
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import quantize
from spectr_jax.models.table import TableModel
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.models.vocabulary import Constant
from spectr_jax.testing import chi_square
from spectr_jax.utils.errors import UserError

WIDTH, VOCABULARY, CONTEXT = 16, 11, 96
HEADS = {"heads": 4, "kv_heads": 2, "head_width": 4}
SIZES = {"width": WIDTH, "mlp": 24, **HEADS, "vocab_size": VOCABULARY, "context": CONTEXT}
DRAFT = LlamaConfig(layers=2, **SIZES, embed_rank=4, head_tokens=9, features=WIDTH)
KEY = jax.random.key(0)
BASELINE = get_method("baseline")


@pytest.fixture(scope="module")
def draft():
    return Llama(DRAFT, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def deep_draft():
    """Returns a draft model that also reads the output of the target's first layer, twice."""
    made = Llama(dataclasses.replace(DRAFT, feature_layers=(1, 1)), rngs=nnx.Rngs(1))
    made.fuse.kernel[...] = jax.random.normal(jax.random.key(0), made.fuse.kernel.shape)
    made.norms_fuse[1].scale[...] *= 2
    return made


@pytest.fixture(scope="module")
def head():
    """Returns an EAGLE-3 head that reads the outputs of both layers of `llama_target`."""
    shape = Eagle3Config(
        layers=1, **SIZES, head_tokens=9, target_width=WIDTH, target_layers=(1, 2), norm_each=True
    )
    made = Eagle3(shape, rngs=nnx.Rngs(1))
    made.norms_fuse[1].scale[...] *= 2
    return made


def llama_target():
    model = Llama(LlamaConfig(layers=2, **SIZES, tied=True), rngs=nnx.Rngs(0))
    model.embed.embedding[...] *= 50
    return model


def our_target(kind=Transformer):
    shape = {"width": WIDTH, "mlp": 32, "heads": 2, "vocab_size": VOCABULARY, "context": CONTEXT}
    return kind(TransformerConfig(layers=1, **shape), rngs=nnx.Rngs(0))


TARGETS = {"llama": llama_target, "ladder": our_target}


def without_cache(model, tokens_BxT, features_BxTxE=None, **options):
    """Returns the last hidden states [B, T, E] of a model, from one call without a cache."""
    B, T = tokens_BxT.shape
    place = tokens_BxT, jnp.broadcast_to(jnp.arange(T), (B, T)), causal(jnp.zeros((B, T)))
    options |= {} if features_BxTxE is None else {"features_BxNxE": features_BxTxE}
    return model.hidden(*place, **options)[0]


def seen_of(target, draft, tokens_BxT):
    """Returns the target's features [B, T, E], mapped to the width of the draft."""
    if isinstance(draft, Eagle3):
        return draft._fused(without_cache(target, tokens_BxT, also=(1, 2)))
    last = without_cache(target, tokens_BxT)
    if not draft.feature_layers:
        return last
    output = without_cache(target, tokens_BxT, also=(1,))[..., WIDTH:]
    normed = output / jnp.sqrt(jnp.mean(output**2, axis=-1, keepdims=True) + DRAFT.norm_epsilon)
    return last + normed @ draft.fuse.kernel[:WIDTH] + 2 * normed @ draft.fuse.kernel[WIDTH:]


@jax.jit
def expected_pmf(target, draft, drafted, tokens_T, length):
    """Returns p [V] after `length` tokens, of which the last `drafted` are drafts."""
    target, draft = target.merge(), draft.merge()
    shown = seen_of(target, draft, tokens_T[None])
    seen = jnp.pad(shown, ((0, 0), (1, 0), (0, 0)))[:, :-1]

    def see(number, seen):  # The features of a draft come from the draft model.
        place = length - drafted + number
        return seen.at[0, place].set(without_cache(draft, tokens_T[None], seen)[0, place - 1])

    own = without_cache(draft, tokens_T[None], jax.lax.fori_loop(0, drafted, see, seen))
    return jax.nn.softmax(draft.logits_of(own)[0, length - 1])


def _seen(call):
    return call.scored.tokens, call.scored.p, call.scored.length


@pytest.mark.parametrize(
    ("kind", "sees", "prompts"),
    [
        ("llama", "draft", (1,)),
        ("llama", "head", (1, 3)),
        pytest.param("ladder", "deep_draft", (1, 3), marks=pytest.mark.slow),
        pytest.param("llama", "head", (70,), marks=pytest.mark.slow),
    ],
)
def test_draft_probabilities_equal_those_without_a_cache(request, kind, sees, prompts):
    """Checks prompts of one token, of fewer tokens than a call recalls, and one in two chunks."""
    method = get_method("otm_block", tree="2,2,1")
    models = freeze(TARGETS[kind]()), freeze(request.getfixturevalue(sees))
    for prompt in prompts:
        sequence = np.random.default_rng(0).integers(0, VOCABULARY, prompt).tolist()
        emitted = 0
        steps = stream(jax.random.key(prompt), method, *models, sequence, 12, observe=_seen)
        for number, step in enumerate(steps):
            tokens, p, length = (np.asarray(part) for part in step.observed)
            assert length == len(sequence) and tokens[0] == sequence[-1]
            for index, node in enumerate(method.tree.inner):
                path = tokens[np.flatnonzero(method.tree.ancestors[node])[1:]].tolist()
                whole = np.zeros(CONTEXT, np.int32)
                whole[: length + len(path)] = sequence + path
                pmf = expected_pmf(*models, len(path), whole, length + len(path))
                where = f"prompt of {prompt}, call {number}, node {node}"
                np.testing.assert_allclose(p[index], pmf, atol=2e-5, err_msg=where)
            sequence += step.tokens
            emitted += len(step.tokens)
        assert emitted == 12 and number > 1


def test_outputs_follow_the_target(head):
    """Checks two tokens after two prompts; the draft has its own temperature."""
    target, prompts = llama_target(), np.array([[3, 1, 4, 0], [2, 0, 0, 0]])
    lengths, draws = np.array([3, 1]), 5_000
    rows = np.repeat(np.arange(2), draws)
    models = get_method("spectr", tree="2,1"), target, head
    shape = prompts[rows], lengths[rows], 2, Policy(top_k=4)
    made = generate(KEY, *models, *shape, draft_policy=Policy(temperature=0.8))
    calls = np.asarray(made.target_calls)
    assert 1 < calls.mean() < 2
    for row in range(2):
        whole = np.zeros((VOCABULARY, 5), np.int32)
        whole[:, : lengths[row]] = prompts[row, : lengths[row]]
        whole[:, lengths[row]] = np.arange(VOCABULARY)
        logits = np.asarray(target.logits_of(without_cache(target, jnp.asarray(whole))), np.float64)
        first, second = _top_four(logits[:1, lengths[row] - 1]), _top_four(logits[:, lengths[row]])
        exact = first[0][:, None] * second
        ends = np.asarray(made.tokens)[rows == row][:, lengths[row] : lengths[row] + 2]
        counts = np.zeros_like(exact)
        np.add.at(counts, tuple(ends.T), 1)
        assert counts[exact == 0].sum() == 0
        assert chi_square.p_value(counts[exact > 0], exact[exact > 0]) > 1e-3


def _top_four(logits_BxV):
    kept = logits_BxV >= np.sort(logits_BxV, axis=-1)[:, -4:-3]
    weights = np.where(kept, np.exp(logits_BxV - logits_BxV.max(-1, keepdims=True)), 0)
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("kind", "sees", "quantized"), [("ladder", "deep_draft", False), ("llama", "head", True)]
)
def test_greedy_outputs_equal_the_baseline(request, kind, sees, quantized):
    """The draft model reads features of several layers and may be quantized to int8."""
    target, draft = TARGETS[kind](), request.getfixturevalue(sees)
    draft = quantize(draft) if quantized else draft
    prompts, lengths = np.array([[3, 1, 4], [2, 7, 0]]), np.array([3, 2])
    rows = prompts, lengths, 12, Policy(temperature=0.0)
    expected = generate(KEY, BASELINE, target, None, *rows)
    made = generate(KEY, get_method("block", draft_length=3), target, draft, *rows)
    np.testing.assert_array_equal(made.tokens, expected.tokens)


def test_a_new_draft_reads_only_features_of_the_last_layer():
    deep, plain = (
        Llama(dataclasses.replace(DRAFT, feature_layers=layers), rngs=nnx.Rngs(1))
        for layers in ((2, 1), ())
    )
    nnx.update(deep, nnx.state(plain, (nnx.Param, Constant)))
    tokens = jnp.arange(8)[None] % VOCABULARY
    features = without_cache(llama_target(), tokens, also=(2, 1))
    expected = without_cache(plain, tokens, features[..., :WIDTH])
    np.testing.assert_array_equal(without_cache(deep, tokens, features), expected)


class Bfloat16Features(Transformer):
    """A user's target model whose features are bfloat16."""

    def hidden(self, *args, **kwargs):
        hidden, cache = super().hidden(*args, **kwargs)
        return hidden.astype(jnp.bfloat16), cache


@pytest.mark.slow
# The walks of verifiers give this warning with x64.
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
def test_a_bfloat16_target_works_with_x64(draft):
    models, prompts = (our_target(Bfloat16Features), draft), np.ones((1, 20), np.int32)
    with jax.enable_x64(True):
        made, expected = (
            generate(jax.random.key(0), method, *models, prompts, [20], 6, Policy(0.0)).tokens
            for method in (get_method("speculative", draft_length=2), BASELINE)
        )
    np.testing.assert_array_equal(made[:, :26], expected[:, :26])


def test_the_draft_head_scores_only_the_last_recalled_token():
    scored = []

    class Counting(Llama):
        def logits_of(self, x):
            scored.append(x.shape[1])
            return super().logits_of(x)

    counting, method = Counting(DRAFT, rngs=nnx.Rngs(1)), get_method("block", draft_length=5)
    lower(KEY, method, our_target(), counting, [[1, 2]], [2], 4)
    # The first call scores the prompt. Its result is unused, so XLA never computes it.
    assert scored and max(scored[1:]) == 1


def test_features_of_a_prompt_in_pieces_have_its_length():
    prompts, lengths = jnp.ones((2, 70), jnp.int32), jnp.array([70, 3])
    model = llama_target()
    run = jax.jit(lambda: run_on_prompts(model, prompts, lengths, 80, layers_shown=())[1])
    assert run().shape == (2, 70, WIDTH)


def test_targets_that_do_not_fit_the_draft_are_refused(draft):
    method, rows = get_method("speculative", draft_length=2), ([[1]], [1], 2)
    wider = Llama(LlamaConfig(layers=1, **{**SIZES, "width": 20}), rngs=nnx.Rngs(0))
    deep = Llama(dataclasses.replace(DRAFT, feature_layers=(1, 5)), rngs=nnx.Rngs(1))
    with pytest.raises(UserError, match="sees 16 features, but this target has 20"):
        generate(KEY, method, wider, draft, *rows)
    with pytest.raises(UserError, match="sees layer 5, but this target has 2"):
        generate(KEY, method, llama_target(), deep, *rows)
    needs_features = dataclasses.replace(method, drafter=FeatureModel())
    with pytest.raises(UserError, match="draft: sees 0 features, but this target has 16"):
        generate(KEY, needs_features, llama_target(), llama_target(), *rows)
    with pytest.raises(UserError, match=r"feature_layers=\(0, 1\)"):
        dataclasses.replace(DRAFT, feature_layers=[0, 1])
    with pytest.raises(UserError, match="features of a target"):
        generate(KEY, BASELINE, draft, None, *rows)
    with pytest.raises(UserError, match="features=8"):
        LlamaConfig(layers=1, **SIZES, features=8)


def test_the_baseline_runs_with_a_draft_that_does_not_fit():
    table = TableModel(np.full((11,) * 3, 1 / 11))
    assert (
        generate(KEY, BASELINE, table, Llama(DRAFT, rngs=nnx.Rngs(1)), [[1]], [1], 2).lengths == 3
    )
