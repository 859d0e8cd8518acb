"""Predicts the time of a call of a large target from what its compiled program needs."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from large_programs import Program, cache_bytes, weight_bytes

from spectr_jax.decoding.drafters.levels import RECALLED
from spectr_jax.models.llama import LlamaConfig


class Card(NamedTuple):
    """An accelerator: memory in bytes, bandwidths in bytes/s, and times in seconds."""

    memory: float
    bandwidth: float
    flops: float
    launch: float
    latency: float
    link: float

    @property
    def note(self) -> str:
        return (
            "The time of a call is a prediction, not a measurement. A model's run takes the longer "
            f"of its products at {self.flops / 1e12:.0f} TFLOP/s and of reading its weights and "
            f"cache once at {self.bandwidth / 1e9:,.0f} GB/s. All logits are written and read once. "
            f"A kernel takes {self.launch * 1e6:.1f} us more. A collective takes "
            f"{self.latency * 1e6:.0f} us, and its bytes at {self.link / 1e9:.0f} GB/s (twice for "
            "an all-reduce). Nothing overlaps. Host stops take no time, and attention takes only that "
            "of reading the cache."
        )


CARDS = {
    "h100": Card(85e9, 3.35e12, 989e12, 3.4e-6, 10e-6, 450e9),
    "v5e": Card(16e9, 819e9, 197e12, 0.0, 5e-6, 90e9),
}
"""NVLink has 450 GB/s in each direction; a ring on a v5e uses two of its links, of 45 GB/s each."""


def call_seconds(program: Program, row: dict[str, Any], card: Card) -> float:
    """Returns the predicted time of a call."""
    configs, tree = program.configs(), program.decoder().tree
    widths = [[tree.size + 1]]
    if len(configs) > 1:
        inner = [np.intersect1d(level, tree.inner).size for level in tree.levels[1:]]
        widths.append([RECALLED, *(width for width in inner if width)])
    runs = sum(
        _run_seconds(program, config, width, card)
        for config, of_model in zip(configs, widths, strict=True)
        for width in of_model
    )
    logits = 2 * row["logits_bytes"] / program.devices / card.bandwidth
    links = sum(
        each["number"] * card.latency
        + each["bytes"] * (2 if each["kind"] == "all-reduce" else 1) / card.link
        for each in row["collectives"]
    )
    return runs + logits + links + card.launch * sum(row["kernels"].values())


def _run_seconds(program: Program, config: LlamaConfig, width: int, card: Card) -> float:
    """Returns the time of one run of a model on `width` tokens of each sequence."""
    read = weight_bytes(config, program.dtype)
    # An embedding that is not the head is not read whole.
    rows = 0 if config.tied else config.vocab_size * config.width // config.shards
    itemsize = jnp.dtype(config.dtype).itemsize
    read -= rows * itemsize
    products = (
        config.layers
        * ((2 * config.heads + 2 * config.kv_heads) * config.head_width + 3 * config.mlp)
        * config.width
        + config.vocab_size * config.width
    )
    flops = 2 * products * program.sequences * width / config.shards
    memory = (read + cache_bytes(config, program)) / card.bandwidth
    return max(memory, flops / card.flops)
