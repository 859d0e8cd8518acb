"""RMS norm (Zhang and Sennrich, 2019) and layer norm (Ba et al., 2016), in float32."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from spectr_jax.models.layers import cpu


class RMSNorm(nnx.Module):
    """x / rms(x) * scale."""

    def __init__(self, width: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_normalized(x, self.epsilon, self.scale[...])


def rms_normalized(x: jax.Array, epsilon: float, scale: jax.Array | float = 1.0) -> jax.Array:
    """Returns x / rms(x) * scale in float32, over the last axis."""
    scale = jnp.broadcast_to(jnp.asarray(scale, jnp.float32), x.shape[-1:])
    return _normalized(x, scale, jnp.zeros(x.shape[-1:]), centered=False, epsilon=epsilon)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / std(x) * scale + bias."""

    def __init__(self, width: int, epsilon: float):
        self.scale = nnx.Param(jnp.ones(width))
        self.bias = nnx.Param(jnp.zeros(width))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        return _normalized(x, self.scale[...], self.bias[...], centered=True, epsilon=self.epsilon)


def _normalized(x, scale, bias, *, centered, epsilon):
    x, scale, bias = (part.astype(jnp.float32) for part in (x, scale, bias))
    plain = functools.partial(_plain, centered=centered, epsilon=epsilon)
    if not cpu.kernels_in_use():
        return plain(x, scale, bias)
    return cpu.norm(plain, centered=centered, epsilon=epsilon)(x, scale, bias)


def _plain(x, scale, bias, *, centered, epsilon):
    if centered:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean_square + epsilon) * scale + bias
