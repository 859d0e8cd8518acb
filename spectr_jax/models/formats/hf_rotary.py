"""Rotary positions in the config.json of Hugging Face folders."""

from collections.abc import Callable
from typing import Any, NamedTuple

from spectr_jax.models import rotary
from spectr_jax.models.formats.folder import check_fields, check_known, refused
from spectr_jax.utils.errors import UserError

FULL, SLIDING = "full_attention", "sliding_attention"
"""Hugging Face's names of the kinds of layers: those that see all tokens, and those with a window."""
NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "partial_rotary_factor",
)
OUTSIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Fields that older files have next to `rope_scaling`."""


class Rotary(NamedTuple):
    """The rotary positions of a kind of layers.

    Attributes:
      theta: as `LlamaConfig.rope_theta`.
      divisors: as `LlamaConfig.rope_divisors`, of all channel pairs of a head.
      scale: as `LlamaConfig.rope_scale`.
      context: the longest sequence for which these are the positions of transformers.
      channels: number of leading channels of a head that are rotated. Their first half has the
        first channels of the pairs.
    """

    theta: float
    divisors: tuple[float, ...]
    scale: float
    context: int
    channels: int


class _Scaling(NamedTuple):
    """The arguments of a kind of scaling."""

    source: str
    fields: dict[str, Any]
    theta: float
    channels: int
    context: int  # `max_position_embeddings`.

    def need(self, name: str) -> Any:
        """Returns a field; raises `UserError` if there is none."""
        if name not in self.fields:
            kind = self.fields["rope_type"]
            raise UserError(
                f"{self.source!r} has rotary positions of type {kind!r} without {name!r}; fetch it "
                "again"
            )
        return self.fields[name]

    @property
    def original(self) -> int:
        """The context before it was extended."""
        return int(self.fields.get("original_max_position_embeddings", self.context))

    def ones(self, by: float = 1.0) -> tuple[float, ...]:
        return (float(by),) * (self.channels // 2)


def _plain(scaling: _Scaling):
    return (), 1.0, scaling.context


def _linear(scaling: _Scaling):
    return scaling.ones(scaling.need("factor")), 1.0, scaling.context


def _llama3(scaling: _Scaling):
    factor, original = float(scaling.need("factor")), scaling.need(OUTSIDE[-1])
    low, high = float(scaling.need("low_freq_factor")), float(scaling.need("high_freq_factor"))
    if low >= high:
        raise refused(scaling.source, "low_freq_factor", low, f"below high_freq_factor={high}")
    divisors = rotary.llama3_divisors(
        scaling.theta, scaling.channels, factor=factor, low=low, high=high, context=int(original)
    )
    return divisors, 1.0, scaling.context


def _yarn(scaling: _Scaling):
    given, original = scaling.fields, scaling.original
    factor = float(given.get("factor", scaling.context / original))
    divisors = rotary.yarn_divisors(
        scaling.theta,
        scaling.channels,
        factor=factor,
        context=original,
        slow=given.get("beta_slow", 1.0),
        fast=given.get("beta_fast", 32.0),
        whole=given.get("truncate", True),
    )
    scale = rotary.yarn_scale(factor)
    if "mscale" in given and "mscale_all_dim" in given:
        scale = rotary.yarn_scale(factor, given["mscale"])
        scale /= rotary.yarn_scale(factor, given["mscale_all_dim"])
    longest = max(scaling.context, int(factor * original))  # Qwen's files keep the shorter one.
    return divisors, float(given.get("attention_factor", scale)), longest


def _longrope(scaling: _Scaling):
    """Two sets of divisors exist. The one for sequences up to the original context is taken, and
    the context ends there: cached keys would change where transformers switches to the other."""
    given, original = scaling.fields, scaling.original
    divisors, pairs = scaling.need("short_factor"), scaling.channels // 2
    numbers = isinstance(divisors, list) and all(
        type(d) in (int, float) and d > 0 for d in divisors
    )
    if not numbers or len(divisors) != pairs:
        raise refused(scaling.source, "short_factor", divisors, f"{pairs} positive numbers")
    scale = rotary.longrope_scale(given.get("factor", scaling.context / original), original)
    longest = min(scaling.context, original)
    return tuple(divisors), float(given.get("attention_factor", scale)), longest


def _proportional(scaling: _Scaling):
    share = float(scaling.fields.get("partial_rotary_factor", 1.0))
    factor = float(scaling.fields.get("factor", 1.0))
    return rotary.partial_divisors(scaling.channels, share, factor), 1.0, scaling.context


TYPES: dict[str, Callable[[_Scaling], tuple[tuple[float, ...], float, int]]] = {
    "default": _plain,
    "linear": _linear,
    "dynamic": _plain,  # Its base changes only past `max_position_embeddings`.
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # The name in the first files of Phi-3.
    "proportional": _proportional,
}
"""Functions from a scaling to its divisors, its scale, and the longest sequence."""


def read_rotary(
    source: str, given: dict[str, Any], kind: str, head_width: int, partial: bool = False
) -> Rotary:
    """Returns the rotary positions of a kind of layers, `FULL` or `SLIDING`.

    Newer files have them in `rope_parameters`, which some nest by kind of layer. Older ones have
    `rope_scaling`, and next to it `rope_theta`.

    Args:
      source: the model, named in errors.
      given: the fields of config.json, with defaults and without nulls.
      kind: the kind of layers.
      head_width: width of a head of these layers.
      partial: whether the model can leave some channels as they are.

    Raises:
      UserError: a field is invalid or not supported.
    """
    fields = _fields(source, given, kind)
    if "factor" in fields and "rope_type" not in fields:
        raise refused(source, "rope_scaling", fields, "an object with a rope_type")
    fields = {"rope_theta": 10_000.0, "rope_type": "default", **fields}
    check_known(source, fields, {"rope_type": tuple(TYPES)})
    check_fields(source, fields, {"a positive number": NUMBERS, "true or false": ("truncate",)})
    share, theta = float(fields.get("partial_rotary_factor", 1.0)), float(fields["rope_theta"])
    name, channels = fields["rope_type"], int(head_width * share)
    if share > 1 or (share < 1 and name != "proportional" and (not partial or channels % 2)):
        wanted = "a share of the channels that makes an even number" if partial else "1"
        raise refused(source, "partial_rotary_factor", share, wanted)
    channels = head_width if name == "proportional" else channels
    context = given["max_position_embeddings"]
    try:
        divisors, scale, longest = TYPES[name](_Scaling(source, fields, theta, channels, context))
    except (ZeroDivisionError, ValueError, OverflowError) as error:
        if isinstance(error, UserError):
            raise
        wanted = f"numbers for positions of type {name!r}"
        raise refused(source, "rope_parameters", fields, wanted) from error
    if channels < head_width:
        divisors = rotary.of_first_channels(theta, head_width, channels, divisors)
    return Rotary(theta, divisors, scale, longest, channels)


def _fields(source: str, given: dict[str, Any], kind: str) -> dict[str, Any]:
    """Returns the fields of a kind of layers, without nulls."""
    if kind == SLIDING and "rope_local_base_freq" in given:  # Gemma 3's.
        nested = given.get("rope_parameters")
        own = nested.get(SLIDING) if isinstance(nested, dict) else None
        own = _without_nulls(own) if isinstance(own, dict) else {}
        return {"rope_theta": given["rope_local_base_freq"], **own}
    scaling = _objects(source, given, "rope_scaling")
    if "rope_parameters" in given:
        newer = _objects(source, given, "rope_parameters")
        if any(newer[kind].get(name) != value for name, value in scaling[kind].items()):
            wanted = "equal to rope_parameters, or absent"
            raise refused(source, "rope_scaling", given["rope_scaling"], wanted)
        scaling = newer
    outside = {name: given[name] for name in OUTSIDE if name in given}
    first = {name: outside.pop(name) for name in OUTSIDE[2:] if name in outside}
    return {**outside, **scaling[kind], **first}


def _objects(source: str, given: dict[str, Any], field: str) -> dict[str, dict[str, Any]]:
    """Returns the object of each kind of layers in a field, without nulls; empty if none is given."""
    scaling = given.get(field, {})
    if not isinstance(scaling, dict):
        raise refused(source, field, scaling, "an object")
    nested = [value for value in scaling.values() if isinstance(value, dict)]
    if nested and len(nested) < len(scaling):
        raise refused(source, field, scaling, f"one object, or objects for {FULL} and {SLIDING}")
    found = {}
    for kind in (FULL, SLIDING):
        own = scaling.get(kind) or {} if nested else scaling
        found[kind] = _without_nulls(own)
    return found


def _without_nulls(scaling: dict[str, Any]) -> dict[str, Any]:
    """Returns an object without nulls, and with `rope_type` where older files have `type`."""
    renamed = {"rope_type": scaling.get("type"), **scaling}
    return {name: value for name, value in renamed.items() if name != "type" and value is not None}
