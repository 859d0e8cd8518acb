"""Counts what decoding of large targets needs on accelerators that this machine does not have.

    python scripts/dev/compile_large.py --device=h100 [--only='8B, .*, 8 sequences, 8 devices']

Install the device's compiler as for compile_for.py. Programs have random shapes' worth of nothing:
there are no weights, nothing runs, and kernels are not tuned. Each program is compiled with 2 and
with 4 layers of both models, and its counts are extrapolated to all layers. `--only` is a regular
expression for names of programs. The same command resumes, and recompiles programs of other commits.
Writes DEVICE-large.md and DEVICE-large.json.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import large_tables
import numpy as np
from absl import flags
from ahead_of_time import DEVICES, accelerators, compiled
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spectr_jax.decoding import Method, get_method
from spectr_jax.decoding.generate import lower
from spectr_jax.decoding.request import padded_length
from spectr_jax.experiments.measure import report
from spectr_jax.models import parallel
from spectr_jax.models.base import split_abstract
from spectr_jax.models.frozen import Frozen, freeze
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import quantize
from spectr_jax.models.weights import named_leaves, with_leaves
from spectr_jax.utils import cli, sharding
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import read_json, write_json

_WORKDIR = flags.DEFINE_string("workdir", "runs/compiled", "Where the table goes.")
_DEVICE = flags.DEFINE_string("device", "h100", "h100 or v5e.")
_ONLY = flags.DEFINE_string("only", "", "Regular expression: compile programs with such names.")
_FULL = flags.DEFINE_bool("full", False, "Also compile all layers, to check the extrapolation.")


def shape(layers, width, mlp, heads, kv_heads, head_width, vocab_size, **more) -> LlamaConfig:
    sizes = layers, width, mlp, heads, kv_heads, head_width, vocab_size
    return LlamaConfig(*sizes, context=40_960, **{"dtype": "bfloat16", "rope_theta": 5e5} | more)


PAIRS = {
    "8B": (
        shape(32, 4096, 14336, 32, 8, 128, 128_256),
        shape(16, 2048, 8192, 32, 8, 64, 128_256, tied=True),
    ),
    "32B": (
        shape(64, 5120, 25600, 64, 8, 128, 151_936, qk_norm=True),
        shape(28, 1024, 3072, 16, 8, 128, 151_936, qk_norm=True, tied=True),
    ),
    "27B": (
        shape(62, 5376, 21504, 32, 16, 128, 262_144, tied=True),
        shape(26, 1152, 6912, 4, 1, 256, 262_144, tied=True),
    ),
}
"""The shapes of Llama-3.1-8B with Llama-3.2-1B, of Qwen3-32B with Qwen3-0.6B, and of decoders as
large as Gemma-3-27B and Gemma-3-1B in the form of the Llama family."""

METHODS = [
    ("baseline", {}),
    ("speculative", {"draft_length": 4}),
    *((name, {"tree": "8x4"}) for name in ("spectr", "otm_block", "otm_layer")),
    ("otm_layer", {"tree": "8x8"}),
]
SEQUENCES, PROMPT, LONG_PROMPT, NEW_TOKENS = (1, 8, 32), 512, 32_768, 64
MESHES = {"h100": (1, 8), "v5e": (8,)}
"""Numbers of devices that share one copy of the models."""
DEPTHS = 2, 4
"""Numbers of layers that are compiled."""


class Program(NamedTuple):
    """One program of the tables; `options` are those of the method."""

    pair: str
    method: str
    options: tuple
    sequences: int
    devices: int
    dtype: str = "bfloat16"
    prompt: int = PROMPT

    @property
    def name(self) -> str:
        method = " ".join([self.method, *(str(value) for _, value in self.options)])
        parts = [self.pair, method, f"{self.sequences} sequences", f"{self.devices} devices"]
        parts += [self.dtype] if self.dtype != "bfloat16" else []
        parts += [f"prompt {self.prompt}"] if self.prompt != PROMPT else []
        return ", ".join(parts)

    def decoder(self) -> Method:
        return get_method(self.method, **dict(self.options))

    def configs(self, layers: int | None = None) -> list[LlamaConfig]:
        """Returns the shapes of the target and, if the method has one, the draft."""
        dtype = "float32" if self.dtype == "int8" else self.dtype
        return [
            dataclasses.replace(config, layers=layers or config.layers, dtype=dtype)
            for config in PAIRS[self.pair][: 1 + self.decoder().needs_draft]
        ]


def programs(device: str) -> Iterator[Program]:
    """Yields all programs of a device."""
    for devices, pair, sequences in itertools.product(MESHES[device], PAIRS, SEQUENCES):
        for method, options in METHODS:
            yield Program(pair, method, tuple(options.items()), sequences, devices)
    if device == "h100":
        yield Program("32B", "baseline", (), 8, 1, "int8")
        yield Program("32B", "otm_layer", (("tree", "8x4"),), 8, 1, "int8")
        yield Program("8B", "baseline", (), 1, 1, prompt=LONG_PROMPT)
        yield Program("8B", "speculative", (("draft_length", 4),), 1, 1, prompt=LONG_PROMPT)


def weights(config: LlamaConfig, mesh: Mesh, dtype: str, least: int) -> Frozen:
    """Returns a model without its weights, split as `request.checked` would.

    A draft whose heads cannot be split is replicated; `generate` refuses it on this mesh.
    """
    devices = mesh.shape[sharding.MODEL]
    build = functools.partial(_build, config, dtype)
    graphdef, state = split_abstract(build)
    leaves, places = named_leaves(state), {}
    of = functools.partial(_dtype, dtype)
    split = devices > 1 and _bytes(leaves, of) >= least
    try:
        wanted = parallel.laid_out(config, devices) if split else config
    except UserError as error:
        if not least:
            raise
        print(f"The draft is replicated: {error}")
        wanted, split = config, False
    if wanted != config:
        graphdef, state = split_abstract(functools.partial(_build, wanted, dtype))
        leaves = named_leaves(state)
    places = parallel.specs(leaves) if split else dict.fromkeys(leaves, PartitionSpec())
    arrays = {
        name: jax.ShapeDtypeStruct(
            leaf.shape, of(leaf), sharding=NamedSharding(mesh, places[name])
        )
        for name, leaf in leaves.items()
    }
    return freeze(nnx.merge(graphdef, with_leaves(state, arrays)))


def _build(config: LlamaConfig, dtype: str, rngs: Any) -> Llama:
    model = Llama(config, rngs=rngs)
    return quantize(model) if dtype == "int8" else model


def _dtype(dtype: str, leaf: Any) -> Any:
    return jnp.bfloat16 if dtype == "bfloat16" and len(leaf.shape) > 1 else leaf.dtype


def _bytes(leaves: dict[str, Any], of: Any) -> int:
    return sum(math.prod(leaf.shape) * of(leaf).dtype.itemsize
               if hasattr(of(leaf), "dtype") else math.prod(leaf.shape) * jnp.dtype(of(leaf)).itemsize
               for leaf in leaves.values())


def models(program: Program, mesh: Mesh, layers: int | None = None) -> list[Frozen]:
    return [
        weights(config, mesh, program.dtype, least)
        for config, least in zip(program.configs(layers), (0, parallel.SPLIT), strict=False)
    ]
