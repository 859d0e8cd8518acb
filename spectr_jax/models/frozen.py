"""A model taken apart once, for many decodings: `nnx.split` of the 97M and its draft takes 10 ms of Python each time."""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx

from spectr_jax.models.base import Model


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves"],
    meta_fields=["graphdef", "structure", "vocab_size", "context", "layers"],
)
@dataclasses.dataclass(frozen=True)
class Frozen:
    """The arrays and the structure of a model: a pytree that goes through `jax.jit`.

    Attributes:
      leaves: its arrays.
      graphdef: with `structure`, what `merge` builds the model of.
      structure: see `graphdef`.
      vocab_size: the model's, as are `context` and `layers`.
      context: see `vocab_size`.
      layers: see `vocab_size`.
    """

    leaves: list[jax.Array]
    graphdef: Any
    structure: Any
    vocab_size: int
    context: int
    layers: int

    def merge(self) -> Any:
        """The model; its arrays are traced inside jit."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, self.leaves))


def freeze(model: Model | Frozen) -> Frozen:
    """Takes an `nnx.Module` that follows `Model` apart. Changes of its weights do not reach what is frozen already."""
    if isinstance(model, Frozen):
        return model
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return Frozen(leaves, graphdef, structure, model.vocab_size, model.context, model.layers)
