"""Log-probabilities of emitted tokens and of given sequences equal those of a full forward pass of
the target."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import Policy, get_method, repetition_penalty, scoring, stream
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.policy import probabilities
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils.errors import UserError

VOCAB, NEW = 13, 12
LENGTHS = np.array([1, 4, 5, 2])
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (4, 5))
POLICY = Policy(temperature=np.array([1.0, 0.0, 0.6, 1.4]), top_k=np.array([0, 0, 5, 0]), eos=7)


def _transformer(seed, layers):
    shape = {"vocab_size": VOCAB, "width": 16, "mlp": 32, "heads": 2, "context": 32}
    return Transformer(TransformerConfig(layers=layers, **shape), rngs=nnx.Rngs(seed))


TARGET, DRAFT = _transformer(0, 2), _transformer(1, 1)


@jax.jit
def forward(tokens):
    """Returns the target's logits [B, T, V] of sequences [B, T], from one forward pass."""
    B, T = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    return TARGET.extend(tokens, positions, jnp.broadcast_to(jnp.tri(T, dtype=bool), (B, T, T)))[0]


def expected(out, policy, process=None):
    """Returns both log-probabilities [B, T] of a generation, from one forward pass."""
    tokens = jnp.asarray(out.tokens)
    B, T = tokens.shape
    logits = np.array(forward(tokens))
    shaped = logits.copy()
    for row, place in np.ndindex(B, T) if process else ():
        before = jnp.where(jnp.arange(T) <= place, tokens[row], 0)
        shaped[row, place] = process(jnp.asarray(logits[row, place]), before, place + 1)
    pmf = np.asarray(probabilities(jnp.asarray(shaped), policy))
    own = np.asarray(jax.nn.log_softmax(logits))
    index = np.maximum(np.asarray(tokens), 0)[:, 1:, None]
    new = (np.arange(T) >= LENGTHS[:, None]) & (np.arange(T) < np.asarray(out.lengths)[:, None])
    made = []
    for table in (np.log(np.maximum(pmf, 1e-30)), own):
        chosen = np.take_along_axis(table[:, :-1], index, axis=-1)[..., 0]
        made.append(np.where(new, np.pad(chosen, ((0, 0), (1, 0))), 0))
    return made


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("otm_block", {"tree": "2,2"}),
        ("baseline", {}),
        pytest.param("lookup", {}, marks=pytest.mark.slow),
    ],
)
def test_logprobs_equal_those_of_a_full_forward_pass(name, options):
    """Checks greedy rows, sampled rows with and without top-k, and a stream."""
    arguments = get_method(name, **options), TARGET, DRAFT
    keys = jax.random.split(jax.random.key(0), 4)
    out = generate(keys, *arguments, PROMPTS, LENGTHS, NEW, POLICY, logprobs=True)
    policy, model = expected(out, POLICY)
    np.testing.assert_allclose(out.logprobs.policy, policy, atol=2e-5)
    np.testing.assert_allclose(out.logprobs.model, model, atol=2e-5)
    assert out.logprobs.policy.dtype == np.float32
    assert np.all(out.logprobs.policy[1] == 0) and np.any(model[1] < 0)
    if name != "baseline":  # The streams of other methods take long to compile.
        return
    plain = generate(keys, *arguments, PROMPTS, LENGTHS, NEW, POLICY)
    assert plain.logprobs is None
    np.testing.assert_array_equal(plain.tokens, out.tokens)
    key, rows = jax.random.key(1), (PROMPTS[2:3], LENGTHS[2:3])
    steps = list(stream(key, *arguments, PROMPTS[2], NEW, Policy(0.6), logprobs=True))
    whole = generate(key, *arguments, *rows, NEW, Policy(0.6), logprobs=True)
    for name in ("policy", "model"):
        streamed = np.concatenate([getattr(step.logprobs, name) for step in steps])
        of_whole = getattr(whole.logprobs, name)[0, 5 : 5 + NEW]
        np.testing.assert_allclose(streamed, of_whole, atol=1e-5)  # jax 0.11 rounds otherwise.


@pytest.mark.slow
def test_a_logits_process_applies_to_logprobs_greedy_rows_and_streams():
    policy = Policy(temperature=np.array([1.0, 0.0, 0.6, 0.0]), process=repetition_penalty(1.5))
    keys, rows = jax.random.split(jax.random.key(0), 4), (PROMPTS, LENGTHS, NEW, policy)
    out = generate(keys, get_method("otm_block", tree="2,2"), TARGET, DRAFT, *rows, logprobs=True)
    for made, wanted in zip(out.logprobs, expected(out, policy, policy.process), strict=True):
        np.testing.assert_allclose(made, wanted, atol=3e-5)
    arguments = get_method("baseline"), TARGET, None
    alone = generate(keys, *arguments, *rows)
    np.testing.assert_array_equal(alone.tokens[1::2], out.tokens[1::2])
    single, key = Policy(0.6, process=repetition_penalty(1.5)), jax.random.key(3)
    whole = generate(key, *arguments, PROMPTS[:1], [5], NEW, single)
    steps = stream(key, *arguments, PROMPTS[0], NEW, single)
    streamed = [token for step in steps for token in step.tokens]
    assert streamed == np.asarray(whole.tokens)[0, 5 : 5 + NEW].tolist()


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")
def test_logprobs_are_float32_with_x64():
    with jax.enable_x64(True):
        rows = PROMPTS[:1], [5], 4
        out = generate(
            jax.random.key(0), get_method("baseline"), TARGET, None, *rows, logprobs=True
        )
    assert out.logprobs.model.dtype == np.float32 and np.all(out.logprobs.model[0, 5:9] < 0)


def test_logprobs_must_be_true_or_false():
    with pytest.raises(UserError, match="logprobs=3"):
        generate(jax.random.key(0), get_method("baseline"), TARGET, None, [[1]], [1], 4, logprobs=3)


def test_scores_of_many_lengths_equal_those_of_each_sequence_alone(monkeypatch, count_compilations):
    """In float64 from the logits, in batches of 4 sequences of up to 17 tokens, or 2 longer ones."""
    monkeypatch.setattr(scoring, "BATCH", 64)
    rng, context = np.random.default_rng(1), TARGET.context
    lengths = rng.permutation(np.arange(1, context + 2))
    sequences = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    with count_compilations() as compiled:
        found = scoring.score_all(TARGET, sequences)
    assert len(compiled) == 2
    padded = np.array(
        [sequence[:context] + [0] * (context - len(sequence)) for sequence in sequences]
    )
    tables = np.asarray(forward(padded), np.float64)
    tables -= np.log(np.sum(np.exp(tables), axis=-1, keepdims=True))
    for sequence, scores, table in zip(sequences, found, tables, strict=True):
        N = len(sequence) - 1
        assert scores.logprobs.shape == scores.greedy.shape == (N,)
        expected = table[np.arange(N), sequence[1:]]
        np.testing.assert_allclose(scores.logprobs, expected, atol=1e-5)
        np.testing.assert_array_equal(scores.greedy, table[:N].argmax(-1) == sequence[1:])
    assert any(np.any(each.greedy) for each in found)


def test_scores_of_a_generation_equal_its_own():
    method = get_method("block", draft_length=2)
    arguments = jax.random.key(3), method, TARGET, DRAFT, PROMPTS, LENGTHS, NEW
    out = generate(*arguments, Policy(np.array([0, 0, 1, 1.0])), logprobs=True)
    rows = [np.asarray(out.tokens)[row, :end] for row, end in enumerate(out.lengths)]
    for row, scores in enumerate(scoring.score_all(TARGET, rows)):
        new = slice(LENGTHS[row] - 1, None)
        own = np.asarray(out.logprobs.model)[row, LENGTHS[row] : len(rows[row])]
        np.testing.assert_allclose(scores.logprobs[new], own, atol=1e-5)
        assert np.all(scores.greedy[new]) == (row < 2)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([], "sequences[1]: must be a sequence of tokens; it needs at least BOS"),
        ([[1]], "sequences[1]: must be a sequence of tokens; it needs at least BOS"),
        ([1, VOCAB], "sequences[1]: a token is outside 0..12; use the target's tokenizer"),
        (
            [1] * 34,
            "sequences[1] of 34 tokens: 33 tokens exceed the context 32 of the target; shorten it",
        ),
    ],
)
def test_sequences_that_cannot_be_scored_are_refused(sequence, message):
    with pytest.raises(UserError) as caught:
        scoring.score_all(TARGET, [[1, 2], sequence])
    assert str(caught.value) == message
