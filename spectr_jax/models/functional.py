"""A model made of pure functions and a pytree of parameters, for Linen, Haiku or plain JAX."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from spectr_jax.models.cache import Cache
from spectr_jax.utils.errors import UserError

_STATIC = {"static": True}
FUNCTIONS, OF_FEATURES = ("extend_fn", "init_cache_fn"), ("hidden_fn", "logits_fn")
"""The functions of every model, and of one that shows or sees features."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FunctionalModel:
    """A model that follows the protocol of `models.base` with functions of its parameters.

    It is a pytree whose leaves are those of `params`. Models of the same functions share compiled
    programs. A `lambda` or a bound method that is created again is another function to JAX, so keep
    the functions and replace the parameters: `dataclasses.replace(model, params=params)`.

    Attributes:
      params: any pytree. Its arrays are traced; other leaves, such as Python numbers, are constants.
      extend_fn: (params, arguments of `Model.extend`) -> logits and cache.
      init_cache_fn: (params, batch, capacity) -> `Cache`.
      vocab_size: size of the vocabulary.
      context: longest supported sequence.
      layers: number of layers.
      hidden_fn: (params, arguments of `hidden`) -> hidden states and cache (`ShowsFeatures`,
        `SeesFeatures`); None for a model without features.
      logits_fn: (params, hidden states) -> logits; None for a model without features.
      features_shown: width of a hidden state that a target shows; 0 if none.
      features_seen: width of the target features that a draft consumes; 0 if none.
      feature_layers: target layers that a draft sees besides the last hidden state.

    Raises:
      UserError: a function is missing, or is not a hashable function.
    """

    params: Any
    _: dataclasses.KW_ONLY
    extend_fn: Callable[..., tuple[jax.Array, Cache]] = dataclasses.field(metadata=_STATIC)
    init_cache_fn: Callable[..., Cache] = dataclasses.field(metadata=_STATIC)
    vocab_size: int = dataclasses.field(metadata=_STATIC)
    context: int = dataclasses.field(metadata=_STATIC)
    layers: int = dataclasses.field(metadata=_STATIC)
    hidden_fn: Callable[..., tuple[jax.Array, Cache]] | None = dataclasses.field(
        default=None, metadata=_STATIC
    )
    logits_fn: Callable[..., jax.Array] | None = dataclasses.field(default=None, metadata=_STATIC)
    features_shown: int = dataclasses.field(default=0, metadata=_STATIC)
    features_seen: int = dataclasses.field(default=0, metadata=_STATIC)
    feature_layers: tuple[int, ...] = dataclasses.field(default=(), metadata=_STATIC)

    def __post_init__(self) -> None:
        of_features = self.hidden_fn or self.logits_fn or self.features_shown or self.features_seen
        for name in FUNCTIONS + OF_FEATURES if of_features else FUNCTIONS:
            _check_function(name, getattr(self, name))
        if of_features and not (self.features_shown or self.features_seen):
            raise UserError(
                "features_shown=0, features_seen=0: one must be the width of a hidden state; set "
                "features_shown of a target, or features_seen of a draft"
            )

    # Partial functions rather than methods, so that `check_model` sees the functions' signatures.
    @property
    def extend(self) -> Callable[..., tuple[jax.Array, Cache]]:
        """See `Model.extend`."""
        return functools.partial(self.extend_fn, self.params)

    @property
    def init_cache(self) -> Callable[..., Cache]:
        """See `Model.init_cache`."""
        return functools.partial(self.init_cache_fn, self.params)

    @property
    def hidden(self) -> Callable[..., tuple[jax.Array, Cache]]:
        """See `ShowsFeatures.hidden` and `SeesFeatures`."""
        assert self.hidden_fn is not None
        return functools.partial(self.hidden_fn, self.params)

    @property
    def logits_of(self) -> Callable[..., jax.Array]:
        """See `ShowsFeatures.logits_of`."""
        assert self.logits_fn is not None
        return functools.partial(self.logits_fn, self.params)


def _check_function(name: str, function: Any) -> None:
    """Raises `UserError` unless `function` can be called, and can be a constant of a program."""
    if not callable(function):
        raise UserError(f"{name}={function!r:.40}: must be a function of params and its arguments")
    try:
        hash(function)
    except TypeError as error:
        kind, hint = type(function).__name__, "give a function, and arrays in params"
        raise UserError(f"{name}: a {kind} is not hashable ({error}); {hint}") from error
