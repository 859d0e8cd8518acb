"""One step of training and one of evaluation, as pure functions of a `TrainState`."""

import dataclasses
from typing import Any, NamedTuple

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


class EarlyExitLoss(NamedTuple):
    """An option of training: a second loss behind the first `layer` layers, for self-speculation. Layer 0 is none."""

    layer: int = 0
    weight: float = 0.0


def summed_loss(model, batch: dict[str, jax.Array], dropout_key: jax.Array | None = None, exit_layer: int = 0):
    """Cross-entropy summed over the tokens of a packed batch; `dropout_key` is consumed.

    Returns:
      Nats of the model, nats behind its first `exit_layer` layers (0 if that is 0), and the number of tokens.
    """
    after = (model.layers, exit_layer) if exit_layer else (model.layers,)
    logits = model.exits(
        batch["inputs"], batch["positions"], causal(batch["segments"]), after=after, dropout_key=dropout_key
    )
    real = batch["segments"] > 0
    nats = [jnp.sum(real * optax.softmax_cross_entropy_with_integer_labels(each, batch["targets"])) for each in logits]
    return nats[0], nats[1] if exit_layer else jnp.zeros(()), jnp.sum(real)


def train_step(
    graphdef,
    optimizer: optax.GradientTransformation,
    early_exit: EarlyExitLoss,
    state: TrainState,
    batch: dict[str, jax.Array],
):
    """One update.

    Args:
      graphdef: of the model, from `nnx.split`.
      optimizer: with the schedule in it.
      early_exit: static.
      state: donated by the caller.
      batch: `inputs`, `targets`, `segments`, `positions`, int32 [B, N].

    Returns:
      The new state, and scalars `loss` and `exit_loss` (nats per token), `grad_norm`, `tokens`.
    """

    def objective(params):
        dropout_key = jax.random.fold_in(state.key, state.step)
        nats, exit_nats, tokens = summed_loss(nnx.merge(graphdef, params), batch, dropout_key, early_exit.layer)
        count = jnp.maximum(tokens, 1)
        return (nats + early_exit.weight * exit_nats) / count, (nats / count, exit_nats / count, tokens)

    (_, (loss, exit_loss, tokens)), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "exit_loss": exit_loss, "grad_norm": optax.tree.norm(grads), "tokens": tokens}
    return TrainState(state.step + 1, params, opt_state, state.key), metrics


def eval_step(graphdef, params, batch: dict[str, jax.Array], exit_layer: int = 0):
    """Summed nats, those behind `exit_layer`, and the number of tokens of one batch, without dropout."""
    return summed_loss(nnx.merge(graphdef, params), batch, exit_layer=exit_layer)
