"""Decoding programs of large targets: their shapes, their weights without values, and their sizes."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding.generate import lower
from spectr_jax.models import parallel
from spectr_jax.models.base import split_abstract
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.leaves import named_leaves, with_leaves
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import quantize
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError


def _shape(layers, width, mlp, heads, kv_heads, head_width, vocab_size, **more) -> LlamaConfig:
    sizes = layers, width, mlp, heads, kv_heads, head_width, vocab_size
    return LlamaConfig(*sizes, **{"context": 40_960, "rope_theta": 5e5, "dtype": "bfloat16"} | more)


PAIRS = {
    "8B": (
        _shape(32, 4096, 14336, 32, 8, 128, 128_256),
        _shape(16, 2048, 8192, 32, 8, 64, 128_256, tied=True),
    ),
    "32B": (
        _shape(64, 5120, 25600, 64, 8, 128, 151_936, qk_norm=True),
        _shape(28, 1024, 3072, 16, 8, 128, 151_936, qk_norm=True, tied=True),
    ),
    "27B": (
        _shape(62, 5376, 21504, 32, 16, 128, 262_144, tied=True),
        _shape(26, 1152, 6912, 4, 1, 256, 262_144, tied=True),
    ),
}
"""The shapes of Llama-3.1-8B with Llama-3.2-1B, of Qwen3-32B with Qwen3-0.6B, and of Gemma-3-27B
with Gemma-3-1B, the last pair in the form of the Llama family."""

METHODS = [
    ("baseline", {}),
    ("speculative", {"draft_length": 4}),
    *((name, {"tree": "8x4"}) for name in ("spectr", "otm_block", "otm_layer")),
    ("otm_layer", {"tree": "8x8"}),
]
SEQUENCES, PROMPT, LONG_PROMPT, NEW_TOKENS = (1, 8, 32), 512, 32_768, 64
MESHES = {"h100": (1, 8), "v5e": (8,)}
"""Numbers of devices that share one copy of the models."""


class Program(NamedTuple):
    """One program of the tables. `layers` replaces the numbers of layers of both models."""

    pair: str
    method: str
    options: tuple[tuple[str, Any], ...]
    sequences: int
    devices: int
    dtype: str = "bfloat16"
    prompt: int = PROMPT
    layers: int | None = None

    @property
    def title(self) -> str:
        """Returns the method with its options."""
        return " ".join([self.method, *(str(value) for _, value in self.options)])

    @property
    def name(self) -> str:
        parts = [self.pair, self.title, f"{self.sequences} sequences", f"{self.devices} devices"]
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        parts += [f"prompt {self.prompt}"] if self.prompt != PROMPT else []
        return ", ".join(parts)

    def decoder(self) -> Method:
        return get_method(self.method, **dict(self.options))

    def configs(self) -> list[LlamaConfig]:
        """Returns the shapes of the target and of the draft that `generate` uses on these devices.

        `shards` is 1 for a model that is replicated.
        """
        dtype = "float32" if self.dtype == "int8" else self.dtype
        found = []
        for whole in PAIRS[self.pair][: 1 + self.decoder().needs_draft]:
            wanted = _laid_out(dataclasses.replace(whole, dtype=dtype), self, not found)
            found.append(dataclasses.replace(wanted, layers=self.layers or whole.layers))
        return found


def programs(device: str) -> Iterator[Program]:
    """Yields all programs of a device."""
    for devices, pair, sequences in itertools.product(MESHES[device], PAIRS, SEQUENCES):
        for method, options in METHODS:
            yield Program(pair, method, tuple(options.items()), sequences, devices)
    if device == "h100":
        tree, length = (("tree", "8x4"),), (("draft_length", 4),)
        yield Program("32B", "baseline", (), 8, 1, "int8")
        yield Program("32B", "otm_layer", tree, 8, 1, "int8")
        yield Program("8B", "baseline", (), 1, 1, prompt=LONG_PROMPT)
        yield Program("8B", "speculative", length, 1, 1, prompt=LONG_PROMPT)


def _laid_out(config: LlamaConfig, program: Program, is_target: bool) -> LlamaConfig:
    if program.devices == 1:
        return config
    whole = weight_bytes(config, program.dtype)
    if not is_target and whole < parallel.SPLIT:
        return config
    try:
        return parallel.laid_out(config, program.devices)
    except UserError:
        if is_target:
            raise
        return config


@functools.lru_cache
def _arrays(config: LlamaConfig, dtype: str) -> tuple[dict[str, Any], Any, Any]:
    """Returns abstract arrays by name, the structure of the module and the tree of its arrays."""

    def build(rngs):
        model = Llama(config, rngs=rngs)
        return quantize(model) if dtype == "int8" else model

    graphdef, state = split_abstract(build)
    return named_leaves(state), graphdef, state


def _dtype(config: LlamaConfig, leaf: Any) -> Any:
    halved = config.dtype == "bfloat16" and len(leaf.shape) > 1
    return jnp.dtype(config.dtype if halved else leaf.dtype)


def weights(config: LlamaConfig, dtype: str, mesh: Mesh) -> Frozen:
    """Returns a model without the values of its weights, on all devices or split over them."""
    leaves, graphdef, state = _arrays(config, dtype)
    split = config.shards > 1
    places = parallel.specs(leaves) if split else dict.fromkeys(leaves, PartitionSpec())
    arrays = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, _dtype(config, leaf), sharding=NamedSharding(mesh, places[name])
        )
        for name, leaf in leaves.items()
    }
    return freeze(nnx.merge(graphdef, with_leaves(state, arrays)))


def weight_bytes(config: LlamaConfig, dtype: str) -> int:
    """Returns the bytes of a model's weights on one device."""
    leaves, *_ = _arrays(config, dtype)
    places = parallel.specs(leaves) if config.shards > 1 else {}
    return sum(
        math.prod(leaf.shape)
        * _dtype(config, leaf).itemsize
        // (config.shards if any(places.get(name, ())) else 1)
        for name, leaf in leaves.items()
    )


def cache_bytes(config: LlamaConfig, program: Program) -> int:
    """Returns the bytes of a model's cache on one device."""
    slots = program.prompt + NEW_TOKENS + program.decoder().tree.size
    row = (
        2 * config.kv_heads // config.shards * config.head_width * jnp.dtype(config.dtype).itemsize
    )
    return program.sequences * slots * row * config.layers


def lowered(program: Program, places: list[jax.Device]) -> jax.stages.Lowered:
    """Returns the lowered program of `generate` for the first devices of `places`."""
    places = places[: program.devices]
    mesh = sharding.make_mesh(model=program.devices, devices=places)
    models = [weights(config, program.dtype, mesh) for config in program.configs()]
    prompts = np.ones((program.sequences, program.prompt), np.int32)
    lengths = np.full(program.sequences, program.prompt)
    rows = prompts, lengths, NEW_TOKENS
    target, draft = *models, *[None] * (2 - len(models))
    key, method = jax.random.key(0), program.decoder()
    options = {"mesh": mesh} if mesh.size > 1 else {}
    return lower(key, method, target, draft, *rows, **options)
