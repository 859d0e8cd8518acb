"""A model split once into arrays and structure, for many calls of `generate`.

`nnx.split` of the 97M and its draft takes 10 ms of Python.
"""

import dataclasses
import hashlib
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models.base import Model, feature_layers, features_seen, features_shown
from spectr_jax.utils import hosts
from spectr_jax.utils.errors import UserError

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """The arrays and the structure of a model: a pytree that passes through `jax.jit`.

    Attributes:
      leaves: arrays of the model.
      graphdef: static; `merge` builds the model from it, `structure` and the leaves. It holds all
        parts that are not arrays.
      structure: tree structure of the leaves.
      vocab_size: size of the vocabulary.
      context: longest supported sequence.
      layers: number of layers.
      features_seen: width of the target features that a draft consumes; 0 if none.
      features_shown: width of a hidden state that a target can show; 0 if none.
      feature_layers: target layers that a draft sees besides the last hidden state.
    """

    leaves: list[jax.Array]
    graphdef: Any = dataclasses.field(metadata=_STATIC)
    structure: Any = dataclasses.field(metadata=_STATIC)
    vocab_size: int = dataclasses.field(metadata=_STATIC)
    context: int = dataclasses.field(metadata=_STATIC)
    layers: int = dataclasses.field(metadata=_STATIC)
    features_seen: int = dataclasses.field(default=0, metadata=_STATIC)
    features_shown: int = dataclasses.field(default=0, metadata=_STATIC)
    feature_layers: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)

    def merge(self) -> Any:
        """Returns the model. Its arrays are traced inside jit."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.structure, self.leaves))


class Trained(NamedTuple):
    """A model with its tokenizer: what `spectr_jax.load` returns and `generate` takes.

    Attributes:
      name: a name for display.
      model: follows `models.base.Model`.
      tokenizer: the tokenizer of its vocabulary (`data.tokenizer.AnyTokenizer`).
    """

    name: str
    model: Any
    tokenizer: Any


def freeze(model: Model | Frozen | Trained) -> Frozen:
    """Returns a model in its frozen form, which later changes of its weights do not affect.

    `model` is an `nnx.Module`, or any other pytree with the methods and attributes of `Model`: a
    `FunctionalModel`, an Equinox module, or a dataclass of your own. Its arrays are traced in jit;
    its other leaves are constants, as in Equinox.

    Raises:
      UserError: `model` is not such a pytree or an output of `freeze` or `load`, lacks a part of
        `Model`, or has an unhashable part that is not an array.
    """
    if isinstance(model, Frozen):
        return model
    given: Any = model
    kind = type(model).__name__
    if not isinstance(model, nnx.Module) and not hasattr(model, "init_cache"):
        if hasattr(model, "tokenizer"):
            return freeze(given.model)
        raise UserError(
            f"a {kind} is not a model; give an nnx.Module, a FunctionalModel or another pytree that "
            "follows spectr_jax.models.base, `freeze` of one, or what `load` returns"
        )
    _check_protocol(given)
    if not isinstance(model, nnx.Module) and jax.tree_util.all_leaves([model]):
        hint = "register it (jax.tree_util.register_dataclass), or give a FunctionalModel"
        raise UserError(f"model {kind}: is not a pytree; {hint}")
    graphdef, state = nnx.split(model)  # Of any pytree, not only of modules.
    try:
        hash(graphdef)
    except TypeError as error:
        hint = "make it hashable, or an array"
        raise UserError(f"model {kind}: a part that is not an array: {error}; {hint}") from error
    leaves, structure = jax.tree.flatten(state)
    return Frozen(
        # NumPy's arrays can change later.
        leaves=[jnp.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves],
        graphdef=graphdef,
        structure=structure,
        vocab_size=given.vocab_size,
        context=given.context,
        layers=given.layers,
        features_seen=features_seen(given),
        features_shown=features_shown(given),
        feature_layers=feature_layers(given),
    )


class TooLong(UserError):
    """A sequence exceeds a model's context."""


def check_context(asked: str, tokens: int, model: Frozen | Trained, remedy: str) -> None:
    """Raises `TooLong` if a sequence of `tokens` tokens exceeds the context of `model`.

    Args:
      asked: the options that need these tokens, with their values.
      tokens: the largest number of tokens of a sequence.
      model: the target, or any model with a name.
      remedy: what to do about it.
    """
    context = model.context if isinstance(model, Frozen) else model.model.context
    name = "the target" if isinstance(model, Frozen) else repr(model.name)
    if tokens > context:
        raise TooLong(f"{asked}: {tokens} tokens exceed the context {context} of {name}; {remedy}")


def _check_protocol(model: Any) -> None:
    """Raises `UserError` for a part of `Model` that is missing or of another kind."""
    kind = type(model).__name__
    for name in ("init_cache", "extend"):
        if not callable(getattr(model, name, None)):
            raise UserError(
                f"model {kind}: has no method {name!r}; add it (spectr_jax.models.base)"
            )
    for name in ("vocab_size", "context", "layers"):
        value = getattr(model, name, None)
        if not isinstance(value, numbers.Integral) or value < 1:
            wanted = f"needs a positive integer {name!r}, not {value!r:.40}"
            raise UserError(f"model {kind}: {wanted}; set it (spectr_jax.models.base)")


def digest(model: Model | Frozen | Trained) -> str:
    """Returns twelve hexadecimal digits of a hash of a model's arrays, shapes and dtypes.

    Functions and constants, such as Python numbers in the parameters of a `FunctionalModel`, are not
    part of it.

    If devices of several processes hold the arrays, every process must call it.

    Raises:
      UserError: as `freeze`.
    """
    content = hashlib.sha256()
    for leaf in map(jnp.asarray, freeze(model).leaves):
        leaf = leaf if leaf.is_fully_addressable else jnp.asarray(hosts.fetch(leaf))
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        content.update(f"{array.shape} {array.dtype}".encode())
        content.update(array.tobytes())
    return content.hexdigest()[:12]
