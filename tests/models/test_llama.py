"""Compares the Llama family with a NumPy implementation, and checks the model protocol."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax import check_model
from spectr_jax.models.formats.weights import load_weights, save_weights
from spectr_jax.models.llama import Llama, LlamaConfig, rotary_frequencies
from spectr_jax.models.quantized import Int8Embed, Int8Linear, quantize
from spectr_jax.models.rotary import llama3_divisors
from spectr_jax.utils.errors import UserError

SHAPE = LlamaConfig(
    layers=2, width=24, mlp=40, heads=6, kv_heads=2, head_width=8, vocab_size=31, context=64
)
STRETCHED = llama3_divisors(10_000.0, 8, factor=8.0, low=1.0, high=4.0, context=32)
SHAPES = {
    "llama": SHAPE,
    "llama3": dataclasses.replace(SHAPE, rope_divisors=STRETCHED, tied=True, kv_heads=6),
    "qwen2": dataclasses.replace(SHAPE, qkv_bias=True, tied=True, rope_theta=1e6),
    "qwen3": dataclasses.replace(SHAPE, qk_norm=True, head_width=10, norm_epsilon=1e-6),
}


def random_model(config: LlamaConfig, seed: int = 0) -> Llama:
    """Returns a model with random biases and scales, and a head that separates tokens."""
    model = Llama(config, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)

    def noisy(leaf):
        return (
            leaf + jnp.asarray(rng.normal(0, 0.3, leaf.shape), leaf.dtype)
            if leaf.ndim == 1
            else leaf
        )

    nnx.update(model, jax.tree.map(noisy, nnx.state(model)))
    if config.tied:
        model.embed.embedding[...] *= 20
    return model


def logits(model, tokens) -> np.ndarray:
    B, N = np.shape(tokens)
    positions = jnp.broadcast_to(jnp.arange(N), (B, N))
    visible = jnp.broadcast_to(np.tri(N, dtype=bool), (B, N, N))
    return np.asarray(model.extend(jnp.asarray(tokens), positions, visible)[0])


def reference(model: Llama, tokens: np.ndarray) -> np.ndarray:
    """Returns float64 logits [N, V] of a sequence, head by head and token by token."""
    config = model.config

    def array(leaf):
        return np.asarray(leaf[...], np.float64)

    def norm(x, part):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * array(part.scale)

    def rotated(x, position):  # Rotates one head's [D] as complex numbers.
        half = config.head_width // 2
        frequencies = config.rope_theta ** (-np.arange(half) / half) / np.array(
            config.rope_divisors or 1.0
        )
        made = (x[:half] + 1j * x[half:]) * np.exp(1j * position * frequencies)
        return np.concatenate([made.real, made.imag])

    x = array(model.embed.embedding)[tokens]
    for block in model.blocks:
        bias = 0.0 if block.qkv.bias is None else array(block.qkv.bias)
        heads = (norm(x, block.norm_attention) @ array(block.qkv.kernel) + bias).reshape(
            len(tokens), -1, config.head_width
        )
        q, k, v = np.split(heads, [config.heads, config.heads + config.kv_heads], axis=1)
        if config.qk_norm:
            q, k = norm(q, block.norm_q), norm(k, block.norm_k)
        mixed = np.zeros_like(q)
        for head in range(config.heads):
            kv_head = head // (config.heads // config.kv_heads)
            keys = [rotated(k[n, kv_head], n) for n in range(len(tokens))]
            for n in range(len(tokens)):
                scores = np.array(
                    [rotated(q[n, head], n) @ keys[m] for m in range(n + 1)]
                ) / np.sqrt(config.head_width)
                weights = np.exp(scores - scores.max())
                mixed[n, head] = weights / weights.sum() @ v[: n + 1, kv_head]
        x = x + mixed.reshape(len(tokens), -1) @ array(block.out.kernel)
        gate, up = np.split(norm(x, block.norm_mlp) @ array(block.gate_up.kernel), 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ array(block.down.kernel)
    head = array(model.embed.embedding).T if model.head is None else array(model.head.kernel)
    return norm(x, model.norm) @ head


@pytest.mark.parametrize("kind", SHAPES)
def test_logits_equal_the_numpy_reference(kind):
    model = random_model(SHAPES[kind])
    tokens = np.random.default_rng(1).integers(0, SHAPE.vocab_size, 12)
    expected = reference(model, tokens)
    assert np.ptp(expected, axis=-1).min() > 1
    np.testing.assert_allclose(logits(model, tokens[None])[0], expected, atol=2e-5)


@pytest.mark.parametrize("kind", ["llama3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_llama_models_follow_the_model_protocol(kind):
    """Checks the whole model, and the model of its first layer."""
    model = random_model(SHAPES[kind])
    check_model(model)
    check_model(model, layers=1)


@pytest.mark.parametrize("kind", ["llama", pytest.param("llama3", marks=pytest.mark.slow)])
def test_int8_logits_are_close_and_tied_embeddings_are_quantized(kind):
    model = random_model(SHAPES[kind])
    small = quantize(model)
    tokens = np.random.default_rng(1).integers(0, SHAPE.vocab_size, (1, 12))
    exact, rounded = logits(model, tokens), logits(small, tokens)
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.ptp(exact)
    assert isinstance(small.embed, Int8Embed) == SHAPES[kind].tied and isinstance(
        small.blocks[0].gate_up, Int8Linear
    )
    assert jnp.int8 not in {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model))}
    check_model(small)


def test_bfloat16_models_have_float32_logits_and_bfloat16_caches():
    shape = dataclasses.replace(SHAPES["qwen3"], dtype="bfloat16")
    model = random_model(SHAPES["qwen3"])
    narrow = Llama(shape, rngs=nnx.Rngs(0))
    nnx.update(narrow, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(model)))
    tokens = np.random.default_rng(1).integers(0, SHAPE.vocab_size, (2, 9))
    exact, rounded = logits(model, tokens), logits(narrow, tokens)
    assert rounded.dtype == np.float32 and narrow.init_cache(1, 4).rows[0][0].dtype == jnp.bfloat16
    assert 0 < np.abs(rounded - exact).max() < 0.1 * np.ptp(exact)


def test_int8_keeps_small_channels_next_to_a_large_one():
    """Activations have 16 bits, so values of 0.1 next to one of 1,000 are not rounded to zero."""
    linear = nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(3, 16)).astype(np.float32) * 0.1
    x[:, 5] = 1_000.0
    exact = np.asarray(linear(jnp.asarray(x)) - x[:, 5:6] @ linear.kernel[...][5:6])
    kernel = np.asarray(linear.kernel[...])
    scale = np.abs(kernel).max(0) / 127
    hidden = x[:, 5:6] @ (np.round(kernel / scale) * scale)[5:6]
    made = np.asarray(Int8Linear(linear)(jnp.asarray(x))) - hidden
    assert np.abs(made - exact).max() < 0.05


def test_int8_products_of_zero_and_tiny_rows_are_accurate():
    """Rows of zeros give zeros, and tiny rows have the relative precision of other rows."""
    linear = nnx.Linear(16, 8, use_bias=False, rngs=nnx.Rngs(0))
    x = (
        jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.float32)
        * jnp.array([0, 1e-30, 1])[:, None]
    )
    made, exact = Int8Linear(linear)(x), linear(x)
    assert np.all(made[0] == 0) and np.all(np.isfinite(made))
    for row in (1, 2):
        np.testing.assert_allclose(
            made[row], exact[row], atol=0.02 * float(jnp.abs(exact[row]).max())
        )


def test_llama3_rotary_frequencies_follow_the_published_rule():
    """Compares with the rule of the model's authors, which they state in wavelengths."""
    theta, width, context = 500_000.0, 64, 8192
    plain = theta ** (-np.arange(0, width, 2) / width)
    wavelength = 2 * np.pi / plain
    divisors = np.array(
        llama3_divisors(theta, width, factor=8.0, low=1.0, high=4.0, context=context)
    )
    np.testing.assert_allclose(divisors[wavelength < context / 4], 1)
    np.testing.assert_allclose(divisors[wavelength > context], 8)
    between = (wavelength >= context / 4) & (wavelength <= context)
    smooth = (context / wavelength[between] - 1) / 3
    np.testing.assert_allclose(1 / divisors[between], (1 - smooth) / 8 + smooth)
    assert between.any()
    config = dataclasses.replace(
        SHAPE, head_width=width, rope_theta=theta, rope_divisors=tuple(divisors)
    )
    np.testing.assert_allclose(rotary_frequencies(config), plain / divisors, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 4}, "heads=6: must be a multiple of kv_heads=4"),
        ({"head_width": 7}, "head_width=7: must be even"),
        ({"rope_divisors": (1.0,)}, r"rope_divisors=\(1.0,\): must be 4 positive numbers"),
        ({"rope_divisors": (1.0, np.nan, 1.0, 1.0)}, r"rope_divisors=\(1.0, nan, .* 4 positive"),
    ],
)
def test_inconsistent_shapes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SHAPE, **change)


def test_a_stored_decoder_keeps_windows_and_pairs_that_do_not_rotate(tmp_path):
    changes = {"windows": (3, 0), "rope_divisors": (1.0, 2.0, np.inf, np.inf), "post_norms": True}
    model = random_model(dataclasses.replace(SHAPE, **changes, window_rope_theta=100.0))
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), nnx.state(model))
    nnx.update(model, rounded)
    save_weights(tmp_path / "model", model, b"pieces", {})
    loaded, _ = load_weights(tmp_path / "model")
    assert loaded.config == model.config
    tokens = np.arange(10)[None]
    np.testing.assert_array_equal(logits(loaded, tokens), logits(model, tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": (4,)}, r"windows=\(4,\): must be 2 numbers of tokens"),
        ({"windows": (4, -1)}, r"windows=\(4, -1\): must be 2 numbers of tokens"),
        ({"activation": "relu"}, "activation='relu': must be silu or gelu_tanh"),
        ({"windows": (4, 0), "full_kv_heads": 4}, "heads=6: must be a multiple of kv_heads=4"),
        ({"windows": (4, 0), "full_head_width": 7}, "head_width=7: must be even"),
    ],
)
def test_inconsistent_fields_of_gemma_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(SHAPE, **change)
