"""One training step and one evaluation step, as pure functions of a `TrainState`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax
from flax import nnx

from spectr_jax.models.layers.attention import causal


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run, except its position in the data."""

    step: jax.Array  # int32 [], number of steps taken.
    params: Any  # Parameters, as `nnx.split` returns them.
    opt_state: Any
    key: jax.Array  # Typed key []; part j of update n drops out by `fold_in(fold_in(key, n), j)`.


Objective = Callable[[Any, dict[str, jax.Array], jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
"""(params, batch, key) -> (what is minimised, metrics), as sums over tokens; a metric `loss` is
what is logged and may lack terms of the first. It consumes the key."""


def init_state(
    model: nnx.Module, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    """Returns the state before the first step. `key` becomes part of it."""
    params = nnx.state(model, nnx.Param)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key)


def summed_loss(
    model,
    batch: dict[str, jax.Array],
    dropout_key: jax.Array | None = None,
    exit_layer: int = 0,
    remat: bool = False,
):
    """Returns sums over the tokens of a packed batch. Consumes `dropout_key`.

    Returns:
      The cross-entropy of the model in nats, that of its first `exit_layer` layers (0 if there is
      no exit), and the number of tokens.
    """
    after = (model.layers, exit_layer) if exit_layer else (model.layers,)
    mask = causal(batch["segments"])
    logits = model.exits(
        batch["inputs"], batch["positions"], mask, after=after, dropout_key=dropout_key, remat=remat
    )
    real = batch["segments"] > 0
    nats = [
        jnp.sum(real * optax.softmax_cross_entropy_with_integer_labels(at_exit, batch["targets"]))
        for at_exit in logits
    ]
    return nats[0], nats[1] if exit_layer else jnp.zeros(()), jnp.sum(real)


def train_step(
    graphdef,
    optimizer: optax.GradientTransformation,
    config: ml_collections.ConfigDict,
    state: TrainState,
    batch: dict[str, jax.Array],
):
    """Returns the state of a language model after one update, and scalars `loss` (nats per token),
    `exit_loss` (if there is an exit), `grad_norm` and `tokens`.

    The caller donates `state`. `batch` has `inputs`, `targets`, `segments`, `positions`, int32
    [B, N].
    """
    exits = config.early_exit

    def objective(params, part, key):
        nats, exit_nats, _ = summed_loss(
            nnx.merge(graphdef, params),
            part,
            dropout_key=key,
            exit_layer=exits.layer,
            remat=config.remat,
        )
        logged = {"loss": nats, **({"exit_loss": exit_nats} if exits.layer else {})}
        return nats + exits.weight * exit_nats, logged

    return update(objective, optimizer, config.accumulate, state, batch)


def update(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    accumulate: int,
    state: TrainState,
    batch: dict[str, jax.Array],
):
    """Returns the state after one update that lowers `objective`, and scalars: the objective's
    metrics per token, `grad_norm` and `tokens`.

    The caller donates `state`. `batch` has arrays [B, ...], is processed in `accumulate` parts, and
    its tokens are those whose `segments` [B, N] are not 0.
    """
    tokens = jnp.sum(batch["segments"] > 0)
    step_key = jax.random.fold_in(state.key, state.step)

    def per_token(params, part, key):
        minimised, logged = objective(params, part, key)
        count = jnp.maximum(tokens, 1)
        return minimised / count, {name: value / count for name, value in logged.items()}

    def add_part(sums, numbered):
        index, part = numbered
        (_, logged), grads = jax.value_and_grad(per_token, has_aux=True)(
            state.params, part, jax.random.fold_in(step_key, index)
        )
        return jax.tree.map(jnp.add, sums, grads), logged

    # Every `accumulate`-th row is in one part, so that each device keeps its own rows.
    parts = jax.tree.map(
        lambda rows: jnp.swapaxes(rows.reshape(-1, accumulate, *rows.shape[1:]), 0, 1), batch
    )
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    grads, logged = jax.lax.scan(add_part, zeros, (jnp.arange(accumulate), parts))
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = jax.tree.map(jnp.sum, logged)
    metrics |= {"grad_norm": optax.tree.norm(grads), "tokens": tokens}
    return TrainState(state.step + 1, params, opt_state, state.key), metrics


def eval_step(graphdef, params, batch: dict[str, jax.Array], exit_layer: int = 0):
    """Returns `summed_loss` of a batch, without dropout."""
    return summed_loss(nnx.merge(graphdef, params), batch, exit_layer=exit_layer)
