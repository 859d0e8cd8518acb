"""Model FLOPs utilisation of a run, as in PaLM (Chowdhery et al., 2022, appendix B)."""

import functools
import re
import time

import jax
import jax.numpy as jnp

from spectr_jax.models.llama import LlamaConfig
from spectr_jax.models.transformer import TransformerConfig
from spectr_jax.utils import backend

# Published dense bfloat16 FLOP/s of one device, by the first words of its `device_kind`.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40": 181e12,
    "NVIDIA L40S": 362e12,
    "TPU v2": 23e12,  # A device is one of a chip's two cores.
    "TPU v3": 61e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
}


def flops_per_token(shape: TransformerConfig | LlamaConfig, parameters: int, length: int) -> int:
    """Returns the FLOPs of a training step per token, forward and backward: 6 for each of the
    `parameters` outside the embedding, and 12 * layers * width * length for attention."""
    return 6 * parameters + 12 * shape.layers * shape.width * length


@functools.cache
def peak_flops() -> float:
    """Returns the FLOP/s of all devices: the published ones, or else those of a timed product."""
    published = published_flops(jax.devices()[0].device_kind)
    if published is not None:
        return published * jax.device_count()
    # The devices of one CPU share its cores, and so the speed of one product.
    return _product_flops() * (jax.process_count() if backend.on_cpu() else jax.device_count())


def published_flops(kind: str) -> float | None:
    """Returns the dense bfloat16 FLOP/s of a device by the longest name of `PEAK_FLOPS` that starts
    `kind` in whole words (an L40 is not an L4), or None."""
    names = [name for name in PEAK_FLOPS if re.match(rf"{re.escape(name)}\b", kind)]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def _product_flops(size: int = 1536, tries: int = 5) -> float:
    x = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    seconds = []
    for _ in range(1 + tries):  # The first one compiles, and is never the fastest.
        started = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)
