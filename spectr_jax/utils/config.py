"""Checks of `ml_collections.ConfigDict`s: unknown fields, types and ranges."""

import json
from typing import Any

import ml_collections

from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import digest


def check_fields(
    config: ml_collections.ConfigDict, defaults: ml_collections.ConfigDict, prefix: str = ""
) -> None:
    """Raises `UserError` for an unknown field, a missing field, or a value of the wrong type."""
    for name in config:
        if name not in defaults:
            raise unknown("config field", prefix + name, [prefix + known for known in defaults])
    for name, default in defaults.items():
        field = prefix + name
        if name not in config:
            raise UserError(f"config field {field!r} is missing; the default is {default!r}")
        value = config[name]
        if not isinstance(default, ml_collections.ConfigDict):
            if not _same_kind(value, default):
                kind = f"{type(default).__name__}, such as {default!r}"
                kind = "number, or None" if default is None else kind
                raise UserError(f"{field}={value!r}: must be a {kind}")
        elif isinstance(value, ml_collections.ConfigDict):
            check_fields(value, default, f"{prefix}{name}.")
        else:
            raise UserError(f"{field}={value!r}: must have fields {', '.join(default)}")


def check_positive(config: ml_collections.ConfigDict, *names: str) -> None:
    """Raises `UserError` unless each named field (`a.b` for a nested one) and each entry of a tuple
    is at least 1."""
    for name in names:
        value: Any = config
        for part in name.split("."):
            value = value[part]
        for entry in value if isinstance(value, tuple | list) else (value,):
            if entry < 1:
                raise UserError(f"{name}={entry}: must be at least 1")


def to_json(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Returns the config as plain JSON values."""
    return json.loads(config.to_json())


def config_hash(config: ml_collections.ConfigDict) -> str:
    """Returns twelve hex digits that identify the config. They do not depend on `kind`, nor on a
    `model_parallel` of 1, which configs of older runs lack."""
    fields = {name: value for name, value in to_json(config).items() if name != "kind"}
    if fields.get("model_parallel") == 1:
        del fields["model_parallel"]
    return digest(json.dumps(fields, sort_keys=True).encode())[:12]


def _same_kind(value: Any, default: Any) -> bool:
    """Returns whether `value` has the type of `default`. A float may be an integer, and the default
    None stands for an optional number."""
    if default is None:
        return value is None or _same_kind(value, 0.0)
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, tuple):
        if not isinstance(value, tuple | list) or (default and not value):
            return False
        kind = default[0] if default else 0  # A tuple with an empty default holds integers.
        return all(_same_kind(entry, kind) for entry in value)
    return isinstance(value, type(default))
