"""Tests the values of the CPU kernels, the independence of rows, and the fallback to XLA."""

import os
import subprocess
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from spectr_jax.models.layers import cpu
from spectr_jax.models.layers.attention import attention
from spectr_jax.models.layers.dense import dense_layer
from spectr_jax.models.layers.norms import LayerNorm, RMSNorm

pytestmark = [
    pytest.mark.defaults,
    pytest.mark.skipif(not cpu.kernels_in_use(), reason="the CPU kernels are not in use"),
]
SHAPES = [(576, 960), (1536, 576), (768, 3072), (128, 8192), (577, 33), (31, 17), (1, 1), (9001, 5)]
"""Inputs and outputs of layers: those of our models, odd sizes with unaligned rows, and inputs that
the kernels sum in several segments."""


@pytest.fixture(params=range(cpu.library().spectr_jax_levels() if cpu.kernels_in_use() else 1))
def level(request):
    """Runs a test with each instruction set that both the kernels and this CPU support."""
    cpu.library().spectr_jax_choose_level(request.param)
    yield request.param
    cpu.library().spectr_jax_choose_level(cpu.library().spectr_jax_levels() - 1)


def _factors(rows, inputs, outputs):
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    return x, rng.normal(size=(outputs, inputs)).astype(np.float32)


def _int8(rows, inputs, outputs):
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, inputs)).astype(np.float32)
    kernel = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    return x, kernel, rng.uniform(0.5, 1, outputs).astype(np.float32)


@pytest.mark.parametrize("rows", [1, 40])  # Other numbers have the same bits as each row alone.
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_int8_products_equal_float64(level, inputs, outputs, rows):
    x, kernel, scale = _int8(rows, inputs, outputs)
    made = np.asarray(jax.jit(cpu.int8_rows)(x, kernel, scale))
    units = np.abs(x).max(1, keepdims=True) / 32767
    exact = np.round(x.astype(np.float64) / units) * units @ kernel.T.astype(np.float64) * scale
    unrounded = x.astype(np.float64) @ kernel.T.astype(np.float64) * scale
    size = (
        np.linalg.norm(x, axis=1, keepdims=True)
        * np.maximum(np.linalg.norm(kernel * 1.0, axis=1), 1)
        * scale
    )
    assert np.max(np.abs(made - unrounded) / size) < 2e-4  # Activations are rounded to 16 bits.
    tolerance = 2e-6 + 4e-5 * (inputs < 50)  # Ties may round to either side.
    assert np.max(np.abs(made - exact) / size) < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_float_products_equal_float64(level, inputs, outputs, rows, dtype):
    x, weights = _factors(rows, inputs, outputs)
    kernel = jnp.asarray(weights, dtype)
    exact = x.astype(np.float64) @ np.asarray(kernel, np.float64).T
    np.testing.assert_allclose(jax.jit(cpu.float_rows)(x, kernel), exact, atol=2e-6 * inputs)
    np.testing.assert_allclose(jax.jit(cpu.float_columns)(x, kernel.T), exact, atol=2e-6 * inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "slots", "heads", "kv_heads", "width"),
    [(1, 130, 9, 3, 64), (5, 19, 4, 4, 6), (16, 40, 6, 1, 33)],
)
def test_attention_equals_that_of_jax(tokens, slots, heads, kv_heads, width, dtype):
    rng = np.random.default_rng(slots)
    sizes = ((2, tokens, heads, width), (2, slots, kv_heads, width), (2, slots, kv_heads, width))
    q, k, v = (jnp.asarray(rng.normal(size=size), dtype) for size in sizes)
    mask = (
        jnp.asarray(rng.random((2, tokens, slots)) < 0.6)
        .at[:, :, 0]
        .set(True)
        .at[0, 0, 1:]
        .set(False)
    )
    assert "ffi_call" in str(jax.make_jaxpr(attention)(q, k, v, mask))
    made, expected = (
        attention(q, k, v, mask),
        jax.nn.dot_product_attention(q, k, v, mask=mask[:, None]),
    )
    assert made.dtype == expected.dtype
    tolerance = 2e-6 if dtype == "float32" else 3e-2
    np.testing.assert_allclose(
        made.astype(jnp.float32), expected.astype(jnp.float32), atol=tolerance
    )


def _tree_mask(rng, tokens, slots):
    """Returns a mask [tokens, slots] in which each token sees some slots up to one of its own."""
    last = np.sort(rng.integers(0, slots, tokens)) if tokens < slots else np.arange(tokens) % slots
    last[:: max(tokens // 3, 1)] = rng.integers(0, slots, len(last[:: max(tokens // 3, 1)]))
    mask = (rng.random((tokens, slots)) < 0.7) & (np.arange(slots) < last[:, None])
    mask[:: max(tokens // 5, 1)] = False  # These see a single slot.
    mask[np.arange(tokens), last] = True
    return mask, last


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("tokens", "slots", "heads", "kv_heads", "width"),
    [
        (70, 203, 9, 3, 64),
        (70, 77, 8, 1, 48),
        (33, 129, 2, 2, 128),
        (33, 31, 3, 1, 37),
        (9, 5, 8, 1, 7),
    ],
)
def test_a_query_has_the_same_bits_alone_and_in_a_block(
    level, tokens, slots, heads, kv_heads, width, dtype
):
    """Blocks of queries with tree masks; a query alone has NaN in slots after its last visible one."""
    rng = np.random.default_rng(tokens + slots)
    q = rng.normal(size=(1, tokens, heads, width)).astype(np.float32)
    k, v = (jnp.asarray(rng.normal(size=(1, slots, kv_heads, width)), dtype) for _ in range(2))
    mask, last = _tree_mask(rng, tokens, slots)
    assert len(set(last)) > 1
    attend = jax.jit(cpu.attention(lambda q, *_: q))
    whole = np.asarray(attend(q, k, v, mask[None]))
    unseen = (np.arange(slots) > last[:, None])[:, None, :, None, None]
    of_token = zip(*(jnp.where(unseen, jnp.nan, part) for part in (k, v)), strict=True)
    for n, (keys, values) in enumerate(of_token):
        alone = np.asarray(attend(q[:, [n]], keys, values, mask[None, [n]]))
        np.testing.assert_array_equal(alone.view(np.int32), whole[:, [n]].view(np.int32))
    for few in (2, 3, 5, 9, tokens - 1):
        made = np.asarray(attend(q[:, -few:], k, v, mask[None, -few:]))
        np.testing.assert_array_equal(made.view(np.int32), whole[:, -few:].view(np.int32))
    k, v = (np.repeat(np.asarray(x, np.float64), heads // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bnhd,bthd->bhnt", q, k) / np.sqrt(width)
    weights = np.exp(scores - scores.max(-1, keepdims=True)) * mask
    exact = np.einsum("bhnt,bthd->bnhd", weights / weights.sum(-1, keepdims=True), v)
    np.testing.assert_allclose(whole, exact, atol=3e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("width", [576, 768, 33, 1])
@pytest.mark.parametrize("norm", [RMSNorm, LayerNorm])
def test_norms_equal_float64(level, norm, width, rows):
    rng = np.random.default_rng(rows)
    x = (rng.normal(size=(2, rows, width)) * 10 + 3).astype(np.float32)
    layer = norm(width, 1e-5)
    for name in ("scale", "bias"):
        if hasattr(layer, name):
            setattr(layer, name, nnx.Param(jnp.asarray(rng.normal(size=width), jnp.float32)))
    assert "ffi_call" in str(jax.make_jaxpr(layer)(x))
    exact = x.astype(np.float64)
    if norm is LayerNorm:
        exact -= exact.mean(-1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-5) * layer.scale[...]
    exact = exact + layer.bias[...] if norm is LayerNorm else exact
    made = np.asarray(layer(x))
    np.testing.assert_allclose(made, exact, atol=3e-6)
    # A row has the same bits when it is computed alone.
    np.testing.assert_array_equal(layer(x[1, -1:]), made[1, -1:])


def test_each_row_has_the_same_bits_alone(level):
    x, kernel, scale = _int8(19, 577, 65)
    weights = jnp.asarray(kernel, jnp.float32)
    for product, *rest in (
        (cpu.int8_rows, kernel, scale),
        (cpu.float_rows, weights),
        (cpu.float_columns, weights.T),
    ):
        alone = np.concatenate([product(row[None], *rest) for row in x])
        for rows in (2, 3, 4, 5, 8, 19):
            np.testing.assert_array_equal(product(x[:rows], *rest), alone[:rows])
    q, k = (
        jnp.asarray(part, jnp.float32)
        for part in (x.reshape(1, 19, 1, 577), weights.reshape(1, 65, 1, 577))
    )
    mask = jnp.ones((1, 16, 65), bool)
    alone = np.concatenate([attention(q[:, [n]], k, k, mask[:, [n]]) for n in range(16)], axis=1)
    np.testing.assert_array_equal(attention(q[:, :16], k, k, mask), alone)


@pytest.mark.parametrize(("inputs", "outputs"), [(577, 65), (4170, 9), (9001, 5), (40, 6), (64, 1)])
def test_int8_rows_have_the_same_bits_in_tiles(level, inputs, outputs):
    """Calls on many rows multiply tiles of rows and outputs; sizes here are not multiples of them."""
    x, kernel, scale = _int8(70, inputs, outputs)
    x[5] *= 1e-3
    alone = np.concatenate([cpu.int8_rows(row[None], kernel, scale) for row in x])
    for rows in (*range(1, 18), 31, 32, 33, 64, 69, 70):
        np.testing.assert_array_equal(cpu.int8_rows(x[:rows], kernel, scale), alone[:rows])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(577, 193), (33, 6), (7, 40), (1000, 1), (3, 11000)]
)
def test_float_columns_have_the_same_bits_alone_and_in_any_number_of_rows(
    level, inputs, outputs, dtype
):
    """The inputs of large matrices are summed in parts, which may be empty."""
    x, weights = _factors(20, inputs, outputs)
    kernel = jnp.asarray(weights.T, dtype)
    alone = np.concatenate([cpu.float_columns(row[None], kernel) for row in x])
    for rows in range(1, 21):
        np.testing.assert_array_equal(cpu.float_columns(x[:rows], kernel), alone[:rows])
    exact = x.astype(np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(alone, exact, atol=2e-6 * inputs)


def test_kernel_gradients_equal_analytic_gradients():
    x, kernel, scale = _int8(3, 40, 24)
    g = np.random.default_rng(0).normal(size=(3, 24)).astype(np.float32)
    made = jax.grad(lambda x: jnp.sum(cpu.int8_rows(x, kernel, scale) * g))(x)
    np.testing.assert_allclose(made, (g * scale) @ kernel.astype(np.float32), rtol=1e-5, atol=1e-4)
    weights = jnp.asarray(kernel, jnp.float32)
    by_x, by_kernel = jax.grad(lambda x, kernel: jnp.sum(cpu.float_columns(x, kernel) * g), (0, 1))(
        x, weights.T
    )
    np.testing.assert_allclose(by_x, g @ weights, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(by_kernel, x.T @ g, rtol=1e-5, atol=1e-5)
    by_rows = jax.grad(lambda kernel: jnp.sum(cpu.float_rows(x, kernel) * g))(weights)
    np.testing.assert_allclose(by_rows, g.T @ x, rtol=1e-5, atol=1e-5)
    check_grads(LayerNorm(24, 1e-5), (jnp.asarray(g),), order=1, modes=["rev"], rtol=1e-2)


def test_int8_products_have_correct_second_derivatives():
    x, kernel, scale = _int8(2, 8, 4)
    square = jax.grad(lambda x: jnp.sum(cpu.int8_rows(x, kernel, scale) ** 2))
    by_x = jax.grad(lambda x: jnp.sum(square(x)))(x)
    expected = 2 * (kernel * scale[:, None]).T @ (kernel * scale[:, None]) @ np.ones(8)
    np.testing.assert_allclose(by_x, np.tile(expected, (2, 1)), rtol=1e-4)


def test_operands_of_wrong_shapes_or_dtypes_are_refused():
    x, kernel, scale = _int8(3, 40, 24)
    for product, *rest in (
        (cpu.int8_rows, kernel, scale),
        (cpu.float_rows, kernel * 1.0),
        (cpu.float_columns, kernel.T * 1.0),
    ):
        with pytest.raises(TypeError, match="dot_general"):
            product(x[:, :39], *rest)
    for target, operands, *attributes in (
        ("int8_rows", (x[:, :39], kernel, scale)),
        ("int8_rows", (x, kernel, scale[:1])),
        ("float_columns", (x, kernel.T.astype(np.float16))),
        ("norm", (x, scale, scale), {"epsilon": np.float32(1), "centered": False}),
        (
            "attention",
            (
                np.zeros((1, 2, 1, 4), np.float32),
                *np.zeros((2, 1, 3, 1, 4), np.float32),
                np.ones((1, 1, 3), bool),
            ),
        ),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
            jax.block_until_ready(
                cpu._call(target, operands[0].shape, *operands, **dict(*attributes))
            )


def test_attention_broadcasts_one_mask_to_all_sequences():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(3, 4, 2, 8)), jnp.float32)
    mask = jnp.tril(jnp.ones((1, 4, 4), bool))
    np.testing.assert_allclose(
        attention(q, q, q, mask),
        jax.nn.dot_product_attention(q, q, q, mask=mask[:, None]),
        atol=1e-6,
    )


def test_float16_attention_and_products_fall_back_to_xla():
    q = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 2, 8)), jnp.float16)
    mask = jnp.ones((1, 3, 3), bool)
    np.testing.assert_allclose(
        attention(q, q, q, mask),
        jax.nn.dot_product_attention(q, q, q, mask=mask[:, None]),
        atol=1e-2,
    )
    assert "ffi_call" not in str(jax.make_jaxpr(attention)(q, q, q, mask))
    layer = dense_layer(8, 4, dtype=jnp.float16, rngs=nnx.Rngs(0))
    assert "ffi_call" not in str(jax.make_jaxpr(lambda x: layer(x))(q[0, 0]))
    np.testing.assert_allclose(layer(q[0, 0]), layer(jnp.tile(q[0, 0], (20, 1)))[:2], rtol=1e-2)


def test_overflowing_attention_scores_give_uniform_weights():
    q = jnp.full((1, 1, 1, 4), 1e20)
    k = jnp.full((1, 3, 1, 4), -1e20)
    v = jnp.arange(12.0).reshape(1, 3, 1, 4)
    np.testing.assert_allclose(
        attention(q, k, v, jnp.array([[[True, False, True]]]))[0, 0, 0], v[0, [0, 2], 0].mean(0)
    )


def test_non_finite_activations_give_non_finite_products():
    x, kernel, scale = _int8(3, 40, 24)
    x[0, 3], x[1, 5] = np.nan, np.inf
    made = np.asarray(cpu.int8_rows(x, kernel, scale))
    assert np.isnan(made[0]).all() and not np.isfinite(made[1]).any() and np.isfinite(made[2]).all()


PROGRAM = """
import jax, numpy as np
from spectr_jax.models.layers import cpu
assert cpu.kernels_in_use()
rng = np.random.default_rng(0)
x, kernel = rng.normal(size=(3, 576)).astype(np.float32), rng.integers(-127, 128, (1001, 576)).astype(np.int8)
scale = np.ones(1001, np.float32)
made = cpu.int8_rows(x, kernel, scale), cpu.float_columns(x, kernel.T.astype(np.float32))
for _ in range(200):
    again = cpu.int8_rows(x, kernel, scale), cpu.float_columns(x, kernel.T.astype(np.float32))
    assert all((a == b).all() for a, b in zip(made, again))
print(*(float(np.sum(np.asarray(each, np.float64) ** 2)) for each in made))
"""


def test_products_have_the_same_bits_with_any_thread_count():
    def with_threads(count):
        environment = os.environ | {"NPROC": str(count)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert with_threads(1) == with_threads(2) == with_threads(5) != ""


BUILT = cpu.FOLDER / f"_products{sysconfig.get_config_var('EXT_SUFFIX')}"


@pytest.fixture
def kernel_folder(monkeypatch, tmp_path):
    """Returns a folder without kernels, in which the library looks for them during the test."""
    for source in cpu.SOURCES:
        (tmp_path / source).write_bytes((BUILT.parent / source).read_bytes())
    monkeypatch.setattr(cpu, "FOLDER", tmp_path)
    cpu.library.cache_clear()
    yield tmp_path
    cpu.library.cache_clear()


@pytest.mark.parametrize("found", ["no file", "not a library", "built for another CPU"])
def test_kernels_that_cannot_be_loaded_warn_in_one_line(kernel_folder, capsys, found):
    file = kernel_folder / BUILT.name
    if found == "not a library":
        file.write_bytes(b"not a library" + BUILT.read_bytes()[64:])
    if found == "built for another CPU":
        content = bytearray(BUILT.read_bytes())
        content[18:20] = (0xFE).to_bytes(2, "little")  # The CPU field of an ELF header.
        file.write_bytes(content)
    assert cpu.library() is None and not cpu.kernels_in_use()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and cpu.SWITCH in error


def test_kernels_of_another_jaxlib_version_warn_in_one_line(monkeypatch, capsys):
    def refuse(*_, **__):
        raise RuntimeError(
            "INVALID_ARGUMENT: the handler's API version (0.9) is incompatible\nmore"
        )

    cpu.library.cache_clear()
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    assert cpu.library() is None
    assert capsys.readouterr().err.count("\n") == 1
    cpu.library.cache_clear()


def test_the_environment_variable_disables_kernels_silently(monkeypatch, capsys):
    cpu.library.cache_clear()
    monkeypatch.setenv(cpu.SWITCH, "0")
    assert not cpu.kernels_in_use() and not capsys.readouterr().err
    cpu.library.cache_clear()
