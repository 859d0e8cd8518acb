"""The compiled programs of a run and the placement of its state."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import optax
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.models.transformer import Transformer, TransformerConfig, abstract
from spectr_jax.training.optimizer import make_optimizer
from spectr_jax.training.step import StepOptions, TrainState, eval_step, init_state, train_step
from spectr_jax.utils import sharding


class Programs(NamedTuple):
    """The programs of a run. Each compiles on its first call."""

    init: Callable  # (key) -> state; the key is consumed.
    step: Callable  # (state, batch) -> state, metrics; the state is donated.
    evaluate: Callable  # (params, batch) -> sums over its tokens, as of `eval_step`.
    like: TrainState  # Abstract arrays with shardings.


def make_programs(config: ml_collections.ConfigDict, mesh: Mesh) -> Programs:
    """Returns the programs of a language model's training config; see `compiled`."""
    optimizer = make_optimizer(config.optimizer, config.steps)
    shape, exits = TransformerConfig(**config.model), config.early_exit
    options = StepOptions(exits.layer, exits.weight, config.accumulate, config.remat)
    graphdef, _ = abstract(shape)
    return compiled(
        mesh,
        build=lambda rngs: Transformer(shape, rngs=rngs),
        optimizer=optimizer,
        step=functools.partial(train_step, graphdef, optimizer, options),
        evaluate=functools.partial(eval_step, graphdef, exit_layer=options.exit_layer),
    )


def compiled(
    mesh: Mesh,
    *,
    build: Callable[[nnx.Rngs], nnx.Module],
    optimizer: optax.GradientTransformation,
    step: Callable,
    evaluate: Callable,
    given: tuple[Any, ...] = (),
) -> Programs:
    """Returns programs whose parameters and optimizer state are placed on `mesh` by
    `sharding.state_sharding`.

    `step` and `evaluate` are as in `Programs`, with the further arguments `given`, such as a
    teacher's weights, which are replicated. `build` makes a model with random weights.
    """

    def init(key):
        params_key, run_key = jax.random.split(key)
        return init_state(build(nnx.Rngs(params_key)), optimizer, run_key)

    shapes = jax.eval_shape(init, jax.random.key(0))
    places = sharding.state_sharding(mesh, shapes)
    # XLA could place the new state elsewhere, and the second step would compile another program.
    step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
    evaluate = jax.jit(evaluate)
    if given:
        given = sharding.replicate(mesh, given)
        step, evaluate = _with(step, given), _with(evaluate, given)
    return Programs(
        init=jax.jit(init, out_shardings=places),
        step=step,
        evaluate=evaluate,
        like=jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            shapes,
            places,
        ),
    )


def _with(program: Callable, given: tuple[Any, ...]) -> Callable:
    return lambda state, batch: program(state, batch, *given)
