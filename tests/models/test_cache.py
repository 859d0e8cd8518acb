"""Tests which slots a cache write fills, and that it copies no whole buffer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax.models.cache import Cache, differentiable, read, write, zeros
from spectr_jax.models.layers import cpu
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils import backend


def test_integer_rows_of_custom_models_are_written_unchanged():
    """`write` converts only floats to the bits of bfloat16."""
    written = write(jnp.zeros((2, 3), jnp.uint16), jnp.array([[7], [9]]), jnp.array([0, 2]))
    np.testing.assert_array_equal(written, [[7, 0, 0], [0, 0, 9]])


@pytest.mark.optimized
@pytest.mark.skipif(
    not cpu.kernels_in_use(), reason="without the CPU kernels, XLA copies the keys and values"
)
def test_a_call_on_one_token_does_not_copy_the_cache():
    """The call needs less temporary memory than one layer's keys."""
    shape = LlamaConfig(
        layers=2, width=24, mlp=40, heads=6, kv_heads=2, head_width=8, vocab_size=31, context=4096
    )
    model = Llama(shape, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    cache = model.init_cache(1, 4096)

    @functools.partial(jax.jit, donate_argnums=1)
    def step(state, cache, token):
        logits, cache = nnx.merge(graph, state).extend(
            token, cache.lengths[:, None], np.ones((1, 1, 1), bool), cache
        )
        return logits, dataclasses.replace(cache, lengths=cache.lengths + 1)

    program = step.lower(state, cache, jnp.zeros((1, 1), jnp.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes < cache.rows[0][0].nbytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("new", [1, 2])
def test_each_sequence_is_written_at_its_own_start(dtype, new):
    """Rows that would not fit after their start are moved back, and end in the last slot."""
    buffer = np.arange(30.0).reshape(3, 5, 2)
    rows, starts = -1.5 - np.arange(3.0 * new * 2).reshape(3, new, 2), np.array([0, 2, 9])
    expected = buffer.copy()
    for sequence, start in enumerate(np.minimum(starts, 5 - new)):
        expected[sequence, start : start + new] = rows[sequence]
    stored = write(zeros(buffer.shape, dtype), jnp.asarray(buffer, dtype), jnp.zeros(3, jnp.int32))
    written = read(write(stored, jnp.asarray(rows, "float32"), jnp.asarray(starts)))
    assert written.dtype == dtype
    np.testing.assert_array_equal(written.astype("float32"), expected)


@pytest.mark.parametrize("start", [0, 3, 4, 9])
def test_one_row_of_one_sequence_is_written_at_its_start(start):
    """A row whose slot does not exist is written into the last slot."""
    buffer, row = np.arange(10.0, dtype=np.float32).reshape(1, 5, 2), np.array([[[-1.0, -2.0]]])
    expected = buffer.copy()
    expected[0, min(start, 4)] = row[0, 0]
    np.testing.assert_array_equal(
        write(jnp.asarray(buffer), jnp.asarray(row), jnp.array([start])), expected
    )


@pytest.mark.optimized
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices do not convert")
def test_writes_do_not_convert_bfloat16_caches_to_float32():
    """A write neither converts nor copies the buffer."""
    buffer, rows = zeros((3, 512, 2), "bfloat16"), jnp.ones((3, 2, 2), "bfloat16")
    program = jax.jit(write, donate_argnums=0).lower(buffer, rows, jnp.arange(3)).compile()
    assert "f32[3,512" not in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < buffer.nbytes


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_gradients_flow_through_written_rows(dtype, batch, on_cpu, monkeypatch):
    """Drafts that see features are trained through written rows. Gradients of old rows are 0."""
    monkeypatch.setattr(backend, "on_cpu", lambda: on_cpu)
    starts, weights = jnp.arange(batch), jnp.arange(1.0, 1 + batch * 10).reshape(batch, 5, 2)

    def loss(buffer, rows):
        return jnp.sum(weights * write(buffer, rows, starts))

    empty = Cache(zeros((batch, 5, 2), dtype), starts)
    buffer, rows = differentiable(empty).rows, jnp.ones((batch, 2, 2))
    of_buffer, of_rows = jax.grad(loss, argnums=(0, 1))(buffer, rows)
    for sequence in range(batch):
        written = slice(sequence, sequence + 2)
        np.testing.assert_array_equal(of_rows[sequence], weights[sequence, written])
        kept = weights[sequence].at[written].set(0)
        np.testing.assert_array_equal(of_buffer[sequence].astype("float32"), kept)
