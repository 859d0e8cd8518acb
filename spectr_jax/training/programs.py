"""The compiled programs of a run, and where its state lives."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import ml_collections
from flax import nnx
from jax.sharding import Mesh

from spectr_jax import sharding
from spectr_jax.models.transformer import Transformer, TransformerConfig, abstract
from spectr_jax.training.optimizer import make_optimizer
from spectr_jax.training.step import StepOptions, TrainState, eval_step, init_state, train_step


class Programs(NamedTuple):
    """What a run calls; each compiles when it is first called.

    Attributes:
      init: (key) -> state; the key is consumed.
      step: (state, batch) -> state, metrics; the state is donated.
      evaluate: (params, batch) -> what `eval_step` returns.
      like: the state as abstract arrays with shardings.
    """

    init: Callable
    step: Callable
    evaluate: Callable
    like: TrainState


def make_programs(config: ml_collections.ConfigDict, mesh: Mesh) -> Programs:
    """The programs of a training config, with parameters and optimizer state on `mesh` by `sharding.state_sharding`."""
    optimizer = make_optimizer(config.optimizer, config.steps)
    shape = TransformerConfig(**config.model)
    options = StepOptions(config.early_exit.layer, config.early_exit.weight, config.accumulate, config.remat)

    def init(key):
        params_key, run_key = jax.random.split(key)
        return init_state(Transformer(shape, rngs=nnx.Rngs(params_key)), optimizer, run_key)

    graphdef, _ = abstract(shape)
    shapes = jax.eval_shape(init, jax.random.key(config.seed))
    places = sharding.state_sharding(mesh, shapes)
    return Programs(
        init=jax.jit(init, out_shardings=places),
        # The state comes out where it went in, whatever XLA would prefer: one program for all steps.
        step=jax.jit(
            functools.partial(train_step, graphdef, optimizer, options), donate_argnums=0, out_shardings=(places, None)
        ),
        evaluate=jax.jit(functools.partial(eval_step, graphdef, exit_layer=options.exit_layer)),
        like=jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes, places),
    )
