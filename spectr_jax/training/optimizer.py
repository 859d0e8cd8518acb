"""AdamW or Muon, and their learning-rate schedules."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

from spectr_jax.utils.errors import unknown

OPTIMIZERS = ("adamw", "muon")
MUON_RMS = 0.2
"""Root mean square of Muon's updates before the learning rate, equal to AdamW's."""
DECAY = 0.2
"""Fraction of a run over which the `constant` schedule decays to zero."""


def learning_rate(config: ml_collections.ConfigDict, steps: int) -> optax.Schedule:
    """Returns the schedule `config.schedule`, a linear warm-up followed by

    - `rsqrt`: peak * sqrt(warm-up / step), the recipe of Flax's LM1B example;
    - `cosine`: a cosine to zero at `steps`, for short runs;
    - `constant`: the peak until the last `DECAY` of `steps`, then linearly to zero. A lower
      `steps` ends a run early, after the decay.
    """
    peak, warmup = config.learning_rate, max(config.warmup_steps, 1)
    rising = optax.linear_schedule(0.0, peak, warmup)
    if config.schedule == "rsqrt":

        def falling(step):
            return peak * jnp.sqrt(warmup / (jnp.maximum(step, 0) + warmup))

    elif config.schedule == "cosine":
        falling = optax.cosine_decay_schedule(peak, max(steps - warmup, 1))
    elif config.schedule == "constant":
        decay = max(int(DECAY * steps), 1)
        falling = optax.linear_schedule(peak, 0.0, decay, max(steps - warmup - decay, 0))
    else:
        raise unknown("optimizer.schedule", config.schedule, ("rsqrt", "cosine", "constant"))
    return optax.join_schedules([rising, falling], [warmup])


def make_optimizer(config: ml_collections.ConfigDict, steps: int) -> optax.GradientTransformation:
    """Returns the optimizer of the `optimizer` part of a training config, after clipping by global
    norm (0 for none). By `config.name`:

    - `adamw`: the recipe of Flax's LM1B example;
    - `muon`: orthogonalised momentum for the kernels of the blocks, and AdamW with Nesterov's
      momentum for everything else (Jordan et al., 2024). Updates are scaled to the size of
      AdamW's (Liu et al., 2025, arXiv 2502.16982), so that one learning rate serves both.
    """
    rate = learning_rate(config, steps)
    if config.name == "adamw":
        optimizer = optax.adamw(
            rate, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
        )
    elif config.name == "muon":
        optimizer = optax.contrib.muon(
            rate,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_weight_decay=config.weight_decay,
            eps=config.eps,
            consistent_rms=MUON_RMS,
            muon_weight_dimension_numbers=_kernels_of_blocks,
        )
    else:
        raise unknown("optimizer.name", config.name, OPTIMIZERS)
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    return optax.chain(clip, optimizer)


def _kernels_of_blocks(params: Any) -> Any:
    """Returns the axes of the parameters that Muon updates, the matrices of blocks, and None for
    others."""

    def dimensions(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        inner = name.startswith("blocks/") and leaf.ndim == 2
        return optax.contrib.MuonDimensionNumbers(0, 1) if inner else None

    return jax.tree_util.tree_map_with_path(dimensions, params)
