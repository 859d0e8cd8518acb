"""The compiled programs of a run and the placement of its state."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_collections
import optax
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.models.transformer import Transformer, TransformerConfig, abstract, parameter_count
from spectr_jax.training.optimizer import make_optimizer
from spectr_jax.training.step import TrainState, eval_step, init_state, train_step
from spectr_jax.training.throughput import flops_per_token
from spectr_jax.utils import sharding


class Programs(NamedTuple):
    """The programs of a run, each of which compiles on its first call, and what they cost."""

    init: Callable  # (key) -> state; consumes the key. `run` replaces a student's parameters.
    step: Callable  # (state, batch) -> state, metrics; the state is donated.
    evaluate: (
        Callable  # (params, batch) -> sums over its tokens, as `eval_step` or `summed_scores`.
    )
    like: TrainState  # Abstract arrays with shardings.
    schedule: optax.Schedule  # Maps the number of steps taken to the next step's learning rate.
    flops_per_token: int  # Of `step`.


def make_programs(config: ml_collections.ConfigDict, mesh: Mesh) -> Programs:
    """Returns the programs of a language model's training config; see `compiled`."""
    shape = TransformerConfig(**config.model)
    optimizer, schedule = make_optimizer(config.optimizer, config.steps)
    graphdef, _ = abstract(shape)
    parameters = parameter_count(shape) - shape.vocab_size * shape.width
    return compiled(
        mesh,
        build=lambda rngs: Transformer(shape, rngs=rngs),
        optimizer=optimizer,
        step=functools.partial(train_step, graphdef, optimizer, config),
        evaluate=functools.partial(eval_step, graphdef, exit_layer=config.early_exit.layer),
        schedule=schedule,
        flops_per_token=flops_per_token(shape, parameters, shape.context),
    )


def compiled(
    mesh: Mesh,
    *,
    build: Callable[[nnx.Rngs], nnx.Module],
    optimizer: optax.GradientTransformation,
    step: Callable,
    evaluate: Callable,
    schedule: optax.Schedule,
    flops_per_token: int,
    teacher: Any = None,
) -> Programs:
    """Returns programs whose parameters and optimizer state are placed on `mesh` by
    `sharding.state_sharding`.

    `build` makes a model with random weights. The other arguments are as in `Programs`, except that
    `step` and `evaluate` take a keyword argument `teacher` if there is one. It is a pytree of
    arrays, which are replicated.
    """

    def init(key):
        params_key, run_key = jax.random.split(key)
        return init_state(build(nnx.Rngs(params_key)), optimizer, run_key)

    shapes = jax.eval_shape(init, jax.random.key(0))
    shardings = sharding.state_sharding(mesh, shapes)
    # XLA could place the new state elsewhere, and the second step would compile another program.
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    evaluate = jax.jit(evaluate)
    if teacher is not None:
        teacher = sharding.replicate(mesh, teacher)
        step, evaluate = (functools.partial(run, teacher=teacher) for run in (step, evaluate))
    return Programs(
        init=jax.jit(init, out_shardings=shardings),
        step=step,
        evaluate=evaluate,
        like=jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, shardings),
        schedule=schedule,
        flops_per_token=flops_per_token,
    )
