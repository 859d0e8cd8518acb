"""AdamW or Muon, and their learning-rate schedules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

MUON_RMS = 0.2
"""Root mean square of Muon's updates before the learning rate, equal to AdamW's."""
DECAY = 0.2
"""Fraction of a run over which the `constant` schedule decays to zero."""


def make_schedule(config: ml_collections.ConfigDict, steps: int) -> optax.Schedule:
    """Returns the schedule of the `optimizer` part of a training config: a linear warm-up to
    `config.learning_rate`, followed by `SCHEDULES[config.schedule]`."""
    peak, warmup = config.learning_rate, max(config.warmup_steps, 1)
    rising = optax.linear_schedule(0.0, peak, warmup)
    return optax.join_schedules([rising, SCHEDULES[config.schedule](peak, warmup, steps)], [warmup])


def _rsqrt(peak: float, warmup: int, steps: int) -> optax.Schedule:
    """peak * sqrt(warm-up / step), the recipe of Flax's LM1B example."""
    return lambda step: peak * jnp.sqrt(warmup / (jnp.maximum(step, 0) + warmup))


def _cosine(peak: float, warmup: int, steps: int) -> optax.Schedule:
    """A cosine to zero at `steps`, for short runs."""
    return optax.cosine_decay_schedule(peak, max(steps - warmup, 1))


def _constant(peak: float, warmup: int, steps: int) -> optax.Schedule:
    """The peak until the last `DECAY` of `steps`, then linearly to zero. A lower `steps` ends a run
    early, after the decay."""
    decay = max(int(DECAY * steps), 1)
    return optax.linear_schedule(peak, 0.0, decay, max(steps - warmup - decay, 0))


SCHEDULES: dict[str, Callable[[float, int, int], optax.Schedule]] = {
    "rsqrt": _rsqrt,
    "cosine": _cosine,
    "constant": _constant,
}
"""(peak, steps of the warm-up, steps of the run) -> the learning rate after the warm-up."""


def make_optimizer(
    config: ml_collections.ConfigDict, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Returns the optimizer `OPTIMIZERS[config.name]` of the `optimizer` part of a training config,
    after clipping by global norm (0 for none), and its schedule (`make_schedule`)."""
    schedule = make_schedule(config, steps)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, OPTIMIZERS[config.name](config, schedule)), schedule


def _adamw(config: ml_collections.ConfigDict, rate: optax.Schedule) -> optax.GradientTransformation:
    """The recipe of Flax's LM1B example."""
    return optax.adamw(
        rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )


def _muon(config: ml_collections.ConfigDict, rate: optax.Schedule) -> optax.GradientTransformation:
    """Orthogonalised momentum for the kernels of the blocks, and AdamW with Nesterov's momentum for
    everything else (Jordan et al., 2024). Updates are scaled to the size of AdamW's (Liu et al.,
    2025, arXiv 2502.16982), so that one learning rate serves both."""
    return optax.contrib.muon(
        rate,
        weight_decay=config.weight_decay,
        adam_b1=config.b1,
        adam_b2=config.b2,
        adam_weight_decay=config.weight_decay,
        eps=config.eps,
        consistent_rms=MUON_RMS,
        muon_weight_dimension_numbers=_kernels_of_blocks,
    )


OPTIMIZERS = {"adamw": _adamw, "muon": _muon}


def _kernels_of_blocks(params: Any) -> Any:
    """Returns the axes of the parameters that Muon updates, the matrices of blocks, and None for
    others."""

    def dimensions(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        inner = name.startswith("blocks/") and leaf.ndim == 2
        return optax.contrib.MuonDimensionNumbers(0, 1) if inner else None

    return jax.tree_util.tree_map_with_path(dimensions, params)
