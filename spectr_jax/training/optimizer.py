"""AdamW and its learning-rate schedules."""

import jax.numpy as jnp
import ml_collections
import optax

from spectr_jax.errors import unknown


def learning_rate(config: ml_collections.ConfigDict, steps: int) -> optax.Schedule:
    """The schedule, by `config.schedule`: linear warm-up, then

    - `rsqrt`: peak * sqrt(warm-up / step), the recipe of Flax's LM1B example;
    - `cosine`: to zero at `steps`, for short runs.
    """
    peak, warmup = config.learning_rate, max(config.warmup_steps, 1)
    rising = optax.linear_schedule(0.0, peak, warmup)
    if config.schedule == "rsqrt":

        def falling(step):
            return peak * jnp.sqrt(warmup / (jnp.maximum(step, 0) + warmup))

    elif config.schedule == "cosine":
        falling = optax.cosine_decay_schedule(peak, max(steps - warmup, 1))
    else:
        raise unknown("optimizer.schedule", config.schedule, ("rsqrt", "cosine"))
    return optax.join_schedules([rising, falling], [warmup])


def make_optimizer(config: ml_collections.ConfigDict, steps: int) -> optax.GradientTransformation:
    """AdamW behind clipping by global norm (0 for none), as `config` (the `optimizer` part of a train config) says."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    adamw = optax.adamw(
        learning_rate(config, steps), b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    return optax.chain(clip, adamw)
