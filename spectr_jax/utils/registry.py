"""Things that are made by name: plans and methods."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from spectr_jax.utils.errors import UserError, unknown

T = TypeVar("T")


def make(
    kind: type[T], factories: Mapping[str, Callable[..., T]], name: str, options: dict[str, Any]
) -> T:
    """Returns `factories[name](**options)`, which must be a `kind`.

    Raises:
      UserError: the name or an option is unknown, or the factory returns something else.
    """
    what = kind.__name__.lower()
    if not isinstance(name, str) or name not in factories:
        raise unknown(what, name, factories)
    known = inspect.signature(factories[name]).parameters
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    for option in options:
        if option not in known and not passes_on:
            names = ", ".join(known) or "none"
            others = [
                each for each, of in factories.items() if option in inspect.signature(of).parameters
            ]
            hint = f"; {', '.join(others)} have {option!r}" if others else ""
            raise UserError(f"{what} {name!r} has no option {option!r}; it has {names}{hint}")
    for option, parameter in known.items():
        is_variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.default is parameter.empty and not is_variadic and option not in options:
            raise UserError(f"{what} {name!r}: needs the option {option!r}; give it")
    product = factories[name](**options)
    if not isinstance(product, kind):
        returns = f"its factory returns {product!r:.40}"
        raise UserError(f"{what} {name!r}: {returns}; return a {kind.__name__}")
    check_equality(product)
    return product


def check_equality(part: Any) -> None:
    """Raises `UserError` if `part`, or a field of it, is equal to others of other options.

    A class that adds `__init__` or fields to a dataclass, and is not decorated itself, inherits an
    equality that ignores them, and `jit` would reuse the program of other options.
    """
    kinds = inspect.getmro(type(part))
    if not dataclasses.is_dataclass(part):
        return
    for kind in itertools.takewhile(lambda kind: "__eq__" not in vars(kind), kinds):
        annotations = inspect.get_annotations(kind)
        adds = ["__init__"] if "__init__" in vars(kind) else []
        adds += [name for name, of in annotations.items() if "ClassVar" not in str(of)]
        if adds:
            raise UserError(
                f"class {kind.__name__}: adds {', '.join(adds)}, which its equality ignores; "
                "decorate it with @dataclasses.dataclass(frozen=True)"
            )
    for field in dataclasses.fields(part):
        check_equality(getattr(part, field.name))


def check_free(kind: type, factories: Mapping[str, Any], name: str) -> None:
    """Raises `UserError` if the name is taken, or is not a string."""
    if not isinstance(name, str):
        raise UserError(f"name={name!r}: must be a string")
    if name in factories:
        taken = f"is already a registered {kind.__name__.lower()}"
        raise UserError(f"name={name!r}: {taken}; choose another name")
