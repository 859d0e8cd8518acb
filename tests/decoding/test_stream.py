"""Streams yield the calls of `generate` one by one, and long prompts run in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.decoding import Policy, get_method, loop, running, stream
from spectr_jax.decoding.drafters import Sequences
from spectr_jax.decoding.generate import generate
from spectr_jax.decoding.request import request_of
from spectr_jax.models.frozen import freeze
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils.errors import UserError

TARGET, DRAFT = (TableModel(random_table(seed, 11)) for seed in (0, 1))
LENGTH = 12


@pytest.mark.parametrize(
    ("name", "options"),
    [("baseline", {}), ("otm_block", {"tree": "2,2"}), ("lookup", {"tree": "2,1"})],
)
def test_stream_steps_equal_the_calls_of_generate(name, options, count_compilations):
    """Sequences end with EOS, with one of several EOS tokens, or at the limit."""
    method = get_method(name, **options)

    def start(call):
        return call.scored.length

    for seed, eos in ((0, (-1, -1)), (1, (-1, -1)), (2, (3, 3)), (3, (5, 9))):
        key, policy = jax.random.key(seed), Policy(eos=eos)
        whole = generate(key, method, TARGET, DRAFT, [[1, 4, 2]], [3], LENGTH, policy)
        with count_compilations() as compiled:
            steps = list(stream(key, method, TARGET, DRAFT, [1, 4, 2], LENGTH, policy, start))
        assert len(steps) == int(whole.target_calls[0])
        tokens = [token for step in steps for token in step.tokens]
        assert tokens == whole.tokens[0, 3 : int(whole.lengths[0])].tolist()
        starts = np.cumsum([3, *(len(step.tokens) for step in steps)])[:-1]
        assert [int(step.observed) for step in steps] == starts.tolist()
        assert len(tokens) == LENGTH or tokens[-1] in eos
        assert not set(eos) & set(tokens[:-1])
        assert seed != 1 or not compiled


def test_bad_stream_arguments_are_refused_before_the_first_step():
    method = get_method("baseline")
    for several in (1, 2):
        with pytest.raises(
            UserError, match=rf"key=key<fry>\[{several}\]: must be a single typed key"
        ):
            stream(jax.random.split(jax.random.key(0), several), method, TARGET, None, [1], 4)
    with pytest.raises(UserError, match="prompts: a token is outside 0"):
        stream(jax.random.key(0), method, TARGET, None, [99], 4)
    with pytest.raises(UserError, match="key=None"):
        stream(None, method, TARGET, None, [1], 4)


def test_prompts_run_in_chunks_fill_the_same_cache(monkeypatch):
    """Prompts of several lengths run in chunks of 4 tokens, and the last chunk is not full."""
    shape = TransformerConfig(layers=2, width=16, mlp=32, heads=2, vocab_size=13, context=32)
    model, method = Transformer(shape, rngs=nnx.Rngs(0)), get_method("speculative", draft_length=1)
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 13, (3, 11)))
    lengths = jnp.array([11, 5, 8])
    models, sequences = (freeze(model), freeze(model)), Sequences(prompts, lengths)

    def start():
        setup = request_of(jax.random.key(0), method, *models, sequences, 3, 3).setup()
        return jax.jit(lambda: loop.begin(setup, sequences, 3))()

    whole = start()
    monkeypatch.setattr(running, "PIECE", 4)
    pieces = start()
    for name in ("target_cache", "drafter_state"):
        one, other = getattr(whole, name), getattr(pieces, name)
        np.testing.assert_array_equal(one.lengths, other.lengths)
        for rows, again in zip(jax.tree.leaves(one.rows), jax.tree.leaves(other.rows), strict=True):
            for row, length in enumerate(one.lengths.tolist()):
                np.testing.assert_allclose(rows[row, :length], again[row, :length], atol=1e-5)
                assert np.abs(rows[row, :length]).max() > 0.1
    np.testing.assert_array_equal(whole.sequences.tokens, pieces.sequences.tokens)


def test_streams_of_different_prompt_lengths_share_a_program(count_compilations):
    method = get_method("baseline")
    list(stream(jax.random.key(0), method, TARGET, None, [1] * 7, 3))
    with count_compilations() as compiled:
        for length in (1, 90, 120):
            steps = stream(jax.random.key(0), method, TARGET, None, [1] * length, 3)
            assert sum(len(step.tokens) for step in steps) == 3
    assert not compiled
