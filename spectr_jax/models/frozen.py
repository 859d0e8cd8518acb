"""A model split once into arrays and structure, for many decodings. `nnx.split` of the 97M and
its draft takes 10 ms of Python."""

import dataclasses
import functools
import hashlib
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models.base import Model, feature_layers, features_seen, features_shown
from spectr_jax.utils.errors import UserError


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["leaves"],
    meta_fields=[
        *("graphdef", "structure", "vocab_size", "context", "layers"),
        *("features_seen", "features_shown", "feature_layers"),
    ],
)
@dataclasses.dataclass(frozen=True)
class Frozen:
    """The arrays and the structure of a model: a pytree that passes through `jax.jit`.

    Attributes:
      leaves: arrays of the model.
      graphdef: static; `merge` builds the model from it, `structure` and the leaves.
      structure: tree structure of the leaves.
      vocab_size: size of the vocabulary.
      context: longest supported sequence.
      layers: number of layers.
      features_seen: width of the target features that a draft consumes; 0 if none.
      features_shown: width of the features that a target can show; 0 if none.
      feature_layers: target layers that a draft sees besides the last hidden state.
    """

    leaves: list[jax.Array]
    graphdef: Any
    structure: Any
    vocab_size: int
    context: int
    layers: int
    features_seen: int = 0
    features_shown: int = 0
    feature_layers: tuple[int, ...] = ()

    def merge(self) -> Any:
        """Returns the model. Its arrays are traced inside jit."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, self.leaves))


@runtime_checkable
class Loaded(Protocol):
    """A model with its tokenizer, as `spectr_jax.load` returns it."""

    @property
    def model(self) -> Model: ...

    @property
    def tokenizer(self) -> Any: ...


def freeze(model: Model | Frozen | Loaded) -> Frozen:
    """Returns the frozen form of an `nnx.Module` that follows `Model`. Later changes of its weights
    have no effect on it.

    Raises:
      UserError: `model` is not a model.
    """
    if isinstance(model, Frozen):
        return model
    given: Any = model
    if not isinstance(model, nnx.Module):
        if not hasattr(model, "tokenizer"):
            raise UserError(
                f"a {type(model).__name__} is not a model; give an nnx.Module, `freeze` of one, or "
                "what `load` returns"
            )
        return freeze(given.model)
    graphdef, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    return Frozen(
        leaves,
        graphdef,
        structure,
        given.vocab_size,
        given.context,
        given.layers,
        features_seen(given),
        features_shown(given),
        feature_layers(given),
    )


def digest(model: Model | Frozen | Loaded) -> str:
    """Returns twelve hexadecimal digits that identify a model's weights: a hash of its arrays,
    shapes and dtypes.

    Raises:
      UserError: as `freeze`.
    """
    content = hashlib.sha256()
    for leaf in map(jnp.asarray, freeze(model).leaves):
        array = np.asarray(
            jax.random.key_data(leaf)
            if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else leaf
        )
        content.update(f"{array.shape} {array.dtype}".encode())
        content.update(array.tobytes())
    return content.hexdigest()[:12]
