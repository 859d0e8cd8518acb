"""The config.json of Hugging Face folders of the Llama family."""

import math
import pathlib
from typing import Any, NamedTuple

from spectr_jax.models.formats.folder import check_fields, check_known, refused
from spectr_jax.models.formats.hf_rotary import FULL, SLIDING, Rotary, read_rotary
from spectr_jax.models.llama import LlamaConfig
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import read_json

SHAPE = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "mlp": "intermediate_size",
    "heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "kv_heads": "num_key_value_heads",
    "head_width": "head_dim",
    "tied": "tie_word_embeddings",
}
"""Fields of config.json by those of `LlamaConfig`. It may leave out the last three."""
GEMMA = {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
GEMMA_2 = GEMMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "phi3": {"original_max_position_embeddings": 4096},
    "gemma": GEMMA | {"num_key_value_heads": 16},
    "gemma2": GEMMA_2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": GEMMA_2
    | {
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": GEMMA_2
    | {
        "vocab_size": 262_144,
        "max_position_embeddings": 131_072,
        "sliding_window": 512,
        "global_head_dim": 512,
        "hidden_size_per_layer_input": 256,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    },
}
"""Defaults of transformers for fields missing from config.json; a null is not replaced."""
WITH_TEXT = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Models of text and images whose config.json nests that of the text model."""
KINDS = ("llama", *DEFAULTS)
"""The values of `model_type`."""
KNOWN: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bidirectional_attention": (None, False, "vision"),
    # What Gemma 4's small models and mixtures add.
    "hidden_size_per_layer_input": (0,),
    "num_kv_shared_layers": (0,),
    "enable_moe_block": (False,),
    "use_double_wide_mlp": (False,),
}
"""The supported values of fields."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FIELDS = {
    "a positive integer": (
        *(set(SHAPE.values()) - {"rms_norm_eps", "tie_word_embeddings"}),
        *("sliding_window", "sliding_window_pattern", "global_head_dim"),
        "num_global_key_value_heads",
    ),
    "a positive number": (
        *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        "rope_local_base_freq",
    ),
    "a non-negative number": ("rms_norm_eps", "max_window_layers"),
    "true or false": ("tie_word_embeddings", "use_sliding_window", "attention_k_eq_v"),
}


class Shape(NamedTuple):
    """The shape of a folder's model, and how its weights are stored.

    Attributes:
      config: the shape.
      adds_one: whether scales of norms are stored as w for 1 + w.
      rotated: number of channels of a head that are rotated; the others come after them.
    """

    config: LlamaConfig
    adds_one: bool
    rotated: int


def read_config(folder: pathlib.Path, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the fields of the text model in config.json, with defaults and without nulls.

    Args:
      folder: of the model.
      given: fields to be taken instead of those of the file; None for the file's.

    Raises:
      UserError: the file is missing, damaged or incomplete, or the model is not supported.
    """
    source = str(folder)
    if given is None:
        given = read_json(folder / "config.json")
        if "draft_vocab_size" in given or "speculators_model_type" in given:
            raise UserError(f"{source!r} is a draft head; give eagle3:{source}, as a draft")
    if isinstance(text := given.get("text_config"), dict) and given.get("model_type") in WITH_TEXT:
        names = ("bos_token_id", "eos_token_id")
        tokens: dict[str, Any] = {name: given[name] for name in names if name in given}
        given = {"model_type": WITH_TEXT[given["model_type"]], **text, **tokens}
    if given.get("quantization_config") is not None:
        remedy = "give the folder of the original model, or a GGUF file"
        raise UserError(f"{source!r} has quantised weights, which are not read here; {remedy}")
    kind = str(given.get("model_type"))
    if kind not in KINDS:
        known = " or ".join(map(repr, ("gpt2", *KINDS, *WITH_TEXT)))
        raise refused(source, "model_type", given.get("model_type"), known, "give another model")
    given = {**DEFAULTS.get(kind, {}), **given}
    given = {name: value for name, value in given.items() if value is not None}
    check_known(source, given, KNOWN)
    check_fields(source, given, FIELDS)
    if missing := [name for name in tuple(SHAPE.values())[:-3] if name not in given]:
        raise UserError(f"{source!r} has a config.json without {missing[0]!r}; fetch it again")
    return given


def read_shape(folder: pathlib.Path, given: dict[str, Any] | None = None) -> Shape:
    """Returns the shape that config.json gives; takes and raises what `read_config` does."""
    source, given = str(folder), read_config(folder, given)
    heads, width, kind = given["num_attention_heads"], given["hidden_size"], given["model_type"]
    optional = {"kv_heads": heads, "head_width": width // heads, "tied": False}
    shape = optional | {ours: given[theirs] for ours, theirs in SHAPE.items() if theirs in given}
    windows = _windows(source, given)
    if kind.startswith("gemma"):
        shape |= _of_gemma(source, given, windows)
    full_width = shape.get("full_head_width") or shape["head_width"]
    partial = kind == "phi3"
    full = read_rotary(source, given, FULL, full_width, partial)
    sliding = read_rotary(source, given, SLIDING, shape["head_width"], partial)
    shape["context"] = min(full.context, sliding.context) if windows else full.context
    if not kind.startswith("gemma") and max(windows, default=0) >= shape["context"]:
        windows = ()
    config = LlamaConfig(
        **shape,
        **_rotary_fields(source, given, windows, full, sliding),
        windows=windows,
        activation=_activation(source, given),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "gemma3_text", "gemma4_text"),
    )
    adds_one = kind in ("gemma", "gemma2", "gemma3_text")
    return Shape(config, adds_one, full.channels if partial else config.head_width)


def _of_gemma(source: str, given: dict[str, Any], windows: tuple[int, ...]) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` that only Gemma's models have."""
    kind, same = given["model_type"], given.get("attention_k_eq_v", False)
    fields: dict[str, Any] = {
        "embed_scale": math.sqrt(given["hidden_size"]),
        "post_norms": kind != "gemma",
        "logit_cap": float(given.get("final_logit_softcapping", 0)),
    }
    if kind in ("gemma2", "gemma3_text"):
        if "query_pre_attn_scalar" not in given:
            raise refused(source, "query_pre_attn_scalar", None, "a positive number")
        fields["query_width"] = float(given["query_pre_attn_scalar"])
    if kind == "gemma2":
        fields["attention_cap"] = float(given.get("attn_logit_softcapping", 0))
    if kind == "gemma4_text":
        own = _of_full_layers(source, given, windows)
        fields |= {"query_width": 1.0, "value_norm": True, "layer_scale": True}
        fields |= {"keys_as_values": same, "full_head_width": own["head_dim"]}
        fields["full_kv_heads"] = own.get("num_key_value_heads", 0)
    return fields


def _of_full_layers(source: str, given: dict[str, Any], windows: tuple[int, ...]) -> dict[str, int]:
    """Returns what differs in the layers of a Gemma 4 that see all tokens, by Hugging Face's names.

    Published files have two fields for it, and files of newer versions of transformers one object.
    """
    if "per_layer_config" not in given:
        heads = given.get("num_global_key_value_heads", 0)
        same = given.get("attention_k_eq_v", False)
        return {"head_dim": given["global_head_dim"], "num_key_value_heads": heads if same else 0}
    by_layer = given["per_layer_config"]
    full = {str(layer) for layer, window in enumerate(windows) if not window}
    first = next(iter(by_layer.values()), None) if isinstance(by_layer, dict) else None
    if (
        not isinstance(first, dict)
        or set(by_layer) != full
        or any(each != first for each in by_layer.values())
        or not first.keys() <= {"head_dim", "num_key_value_heads"}
    ):
        wanted = f"equal objects with head_dim and num_key_value_heads for the {FULL} layers"
        raise refused(source, "per_layer_config", by_layer, wanted)
    check_fields(source, first, {"a positive integer": tuple(first)})
    return {"head_dim": given["head_dim"], **first}


def _activation(source: str, given: dict[str, Any]) -> str:
    """Returns the activation of the MLP. Gemma 1's files say `gelu` and mean its approximation."""
    is_gemma = given["model_type"].startswith("gemma")
    default = "gelu_pytorch_tanh" if is_gemma else "silu"
    name = given.get("hidden_activation", given.get("hidden_act", default))
    if given["model_type"] == "gemma" and name == "gelu":
        name = default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise refused(source, "hidden_act", name, " or ".join(map(repr, ACTIVATIONS)))
    return ACTIVATIONS[name]


def _windows(source: str, given: dict[str, Any]) -> tuple[int, ...]:
    """Returns the window of each layer, 0 for none; empty if no layer has one."""
    layers, kind = given["num_hidden_layers"], given["model_type"]
    window, first = given.get("sliding_window", 0), 0
    if kind.startswith("qwen"):
        window = window if given.get("use_sliding_window", False) else 0
        first = given.get("max_window_layers", layers)
    if kind in ("llama", "gemma"):
        window = 0
    types = given.get("layer_types") if kind not in ("llama", "mistral", "phi3") else None
    if types is not None:
        known = isinstance(types, list) and all(name in (FULL, SLIDING) for name in types)
        if not known or len(types) != layers:
            wanted = f"{layers} times {FULL!r} or {SLIDING!r}, one for each layer"
            raise refused(source, "layer_types", types, wanted)
        slides = [name == SLIDING for name in types]
    elif kind == "gemma2":
        slides = [layer % 2 == 0 for layer in range(layers)]
    elif kind.startswith("gemma"):
        pattern = given.get("sliding_window_pattern", 6)
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        slides = [layer >= first for layer in range(layers)]
    if kind == "gemma4_text":
        slides[-1] = False
    return tuple(window * slide for slide in slides) if window and any(slides) else ()


def _rotary_fields(
    source: str, given: dict[str, Any], windows: tuple[int, ...], full: Rotary, sliding: Rotary
) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` for rotary positions."""
    if windows and 0 not in windows:
        full = sliding
    same = sliding[:3] == full[:3]
    if not same and not windows and "rope_parameters" in given:
        wanted = f"one object, or equal objects for {FULL} and {SLIDING}"
        raise refused(source, "rope_parameters", given["rope_parameters"], wanted)
    if windows and not same and (sliding.divisors or sliding.scale != 1):
        wanted = f"like {FULL}, or without scaling, for {SLIDING}"
        raise refused(source, "rope_parameters", given.get("rope_parameters"), wanted)
    return {
        "rope_theta": full.theta,
        "rope_divisors": full.divisors,
        "rope_scale": full.scale,
        "window_rope_theta": 0.0 if same or not windows else sliding.theta,
    }
