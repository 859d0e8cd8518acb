"""CPU-only code: kernels for calls on a few tokens, and memory layouts that are fast in XLA.

Decoding on a CPU is bound by reading the weights. XLA's CPU libraries repack them in every call;
the kernels of `products.cc` read each weight once, in the layout of the model. They are an optional
extension that `pip install` builds if there is a C++ compiler (`setup.py`). Only kernels that were
built from the C++ sources of this package are loaded. Without them, or with SPECTR_JAX_KERNELS=0 in
the environment, XLA multiplies.
"""

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from spectr_jax.utils import backend

FEW = 16
"""Kernels multiply at most this many rows with float weights; XLA is faster for more."""
MOST_QUERIES = 512
"""The kernel computes attention for at most this many new tokens of a sequence.

It covers prompts, so that int8 models have the same bits in prompts and in calls on a few tokens.
Beyond it the kernel is faster too, but a gradient would compute attention twice.
"""
FLOATS = (jnp.float32, jnp.bfloat16)
SWITCH = "SPECTR_JAX_KERNELS"
FOLDER = pathlib.Path(__file__).parent
SOURCES = ("lanes.h", "products.cc")
TARGETS = ("int8_rows", "float_rows", "float_columns", "attention", "norm")
_PREFIX = "spectr_jax_"
Function = Callable[..., jax.Array]


def kernels_in_use() -> bool:
    """Returns whether the kernels are in use: they were built, and JAX computes on one CPU device.

    With several devices, XLA would gather sharded arguments before each call of a kernel.
    """
    return backend.on_cpu() and jax.device_count() == 1 and library() is not None


def kernels_multiply(*factors: jax.Array) -> bool:
    """Returns whether the kernels multiply factors of these dtypes."""
    return all(factor.dtype in FLOATS for factor in factors) and kernels_in_use()


def built() -> pathlib.Path:
    """Returns the file of kernels that were built from the sources in `FOLDER`.

    It is next to them, or in the installed package if Python imports the code of a clone instead.

    Raises:
      OSError: there is none; the message says why, and what to do.
    """
    name = f"_products{sysconfig.get_config_var('EXT_SUFFIX')}"
    digest = hashlib.sha256(b"".join((FOLDER / source).read_bytes() for source in SOURCES))
    installed = [
        pathlib.Path(str(file.locate()))
        for distribution in importlib.metadata.distributions(name="spectr_jax")
        for file in distribution.files or ()
        if file.name == name
    ]
    found = [file for file in (FOLDER / name, *installed) if file.is_file()]
    for file in found:
        if digest.hexdigest().encode() in file.read_bytes():
            return file
    clone = FOLDER.parents[3]
    again = "install spectr_jax again"
    if (clone / "setup.py").is_file():
        again = f"run: pip install -e {shlex.quote(str(clone))}"
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None:
        again = f"install a C++ compiler ({compiler}), then {again}"
    reason = f"{found[0]} was built from other sources" if found else "they are not built"
    raise OSError(f"{reason}; {again}")


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the kernels, registered with XLA; None if they are off or cannot be loaded.

    In the latter case it prints one line on stderr.
    """
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        loaded = ctypes.CDLL(str(built()))
        for target in TARGETS:
            handler = jax.ffi.pycapsule(getattr(loaded, _PREFIX + target))
            jax.ffi.register_ffi_target(_PREFIX + target, handler, platform="cpu")
    except (OSError, AttributeError, RuntimeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        print(
            f"note: decoding is slower without CPU kernels: {reason} ({SWITCH}=0 hides this note)",
            file=sys.stderr,
        )
        return None
    return loaded


def _call(
    target: str, shape: tuple[int, ...], *arguments: jax.Array, **attributes: Any
) -> jax.Array:
    library()  # The first call registers the targets.
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    kernel = jax.ffi.ffi_call(_PREFIX + target, result, vmap_method="sequential")
    return kernel(*arguments, **attributes)


def _differentiable_as(plain: Function) -> Callable[[Function], Function]:
    """Returns a decorator that gives a kernel the shape errors and gradients of `plain` in JAX."""

    def decorate(kernel: Function) -> Function:
        @jax.custom_vjp
        def function(*given):
            jax.eval_shape(plain, *given)  # Raises for shapes that do not fit.
            return kernel(*given)

        function.defvjp(lambda *given: jax.vjp(plain, *given), lambda backward, g: backward(g))
        return functools.wraps(kernel)(function)

    return decorate


@_differentiable_as(lambda x, kernel, scale: jnp.matmul(x, kernel.T.astype(x.dtype)) * scale)
def int8_rows(x: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the product [R, outputs] of `x` [R, inputs] and int8 weights, in float32.

    The kernel is [outputs, inputs], with scales [outputs]. Activations are rounded to 16 bits, with
    a scale for each row. The bits of a row do not depend on the other rows.
    """
    return _call("int8_rows", (len(x), len(kernel)), x, kernel, scale)


@_differentiable_as(lambda x, kernel: jnp.matmul(x, kernel.T.astype(x.dtype)))
def float_rows(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns float32 [R, outputs] of `x` [R, inputs] and a float kernel [outputs, inputs]."""
    return _call("float_rows", (len(x), len(kernel)), x, kernel)


@_differentiable_as(lambda x, kernel: jnp.matmul(x, kernel.astype(x.dtype)))
def float_columns(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns float32 [R, outputs] of `x` [R, inputs] and a float kernel [inputs, outputs]."""
    return _call("float_columns", (len(x), kernel.shape[1]), x, kernel)


def attention(plain: Function) -> Function:
    """Returns the kernel of attention for a few new tokens, with the gradients of `plain`."""

    @_differentiable_as(plain)
    def attend(q_BxNxHxD: Any, k_BxTxKxD: Any, v_BxTxKxD: Any, mask_BxNxT: Any) -> jax.Array:
        mask_BxNxT = jnp.broadcast_to(mask_BxNxT, (*q_BxNxHxD.shape[:2], k_BxTxKxD.shape[1]))
        queries = q_BxNxHxD.astype(jnp.float32)
        mixed = _call("attention", queries.shape, queries, k_BxTxKxD, v_BxTxKxD, mask_BxNxT)
        return mixed.astype(q_BxNxHxD.dtype)

    return attend


def norm(plain: Function, *, centered: bool, epsilon: float) -> Function:
    """Returns the kernel of a norm (x [..., E], scale [E], bias [E]), with `plain`'s gradients."""

    @_differentiable_as(plain)
    def normalized(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        options = {"epsilon": np.float32(epsilon), "centered": centered}
        return _call("norm", rows.shape, rows, scale, bias, **options).reshape(x.shape)

    return normalized


def in_memory(x: jax.Array) -> jax.Array:
    """Returns `x` stored in row-major order on a CPU, and unchanged elsewhere.

    XLA fuses a transpose into the product that reads it, and a CPU multiplies transposed factors at
    half the speed.
    """
    if not backend.on_cpu():
        return x
    return jax.lax.optimization_barrier(with_layout_constraint(x, Layout(tuple(range(x.ndim)))))
