"""One step of training and one of evaluation, as pure functions of a `TrainState`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spectr_jax.models.transformer import causal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run is, but for its place in the data.

    Attributes:
      step: int32 [], steps taken.
      params: parameters, as `nnx.split` gives them.
      opt_state: of the optimizer.
      key: [] typed key; step `i` draws its dropout from `fold_in(key, i)`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def init_state(model: nnx.Module, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    """The state before the first step; `key` is kept in it."""
    params = nnx.state(model)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key)


def summed_loss(model, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None):
    """Cross-entropy in nats summed over the tokens of a packed batch, and their number; `dropout_key` is consumed."""
    logits, _ = model.extend(batch["inputs"], batch["positions"], causal(batch["segments"]), dropout_key=dropout_key)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    real = batch["segments"] > 0
    return jnp.sum(nats * real), jnp.sum(real)


def train_step(graphdef, optimizer: optax.GradientTransformation, state: TrainState, batch: dict[str, jax.Array]):
    """One update.

    Args:
      graphdef: of the model, from `nnx.split`.
      optimizer: with the schedule in it.
      state: donated by the caller.
      batch: `inputs`, `targets`, `segments`, `positions`, int32 [B, N].

    Returns:
      The new state, and scalars `loss` (nats per token), `grad_norm`, `tokens`.
    """

    def mean_loss(params):
        total, tokens = summed_loss(nnx.merge(graphdef, params), batch, jax.random.fold_in(state.key, state.step))
        return total / jnp.maximum(tokens, 1), tokens

    (loss, tokens), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "tokens": tokens}
    return TrainState(state.step + 1, params, opt_state, state.key), metrics


def eval_step(graphdef, params, batch: dict[str, jax.Array]):
    """Summed nats and the number of tokens of one batch, without dropout."""
    return summed_loss(nnx.merge(graphdef, params), batch)
