"""The Llama family in Hugging Face's layout: models of it are read, and ours are written as
such."""

import math
import pathlib
from typing import Any

import numpy as np

from spectr_jax.models.formats.folder import Folder, check_sizes, read_json, refuse, save
from spectr_jax.models.formats.parts import fill
from spectr_jax.models.llama import Llama, LlamaConfig, llama3_divisors
from spectr_jax.models.quantized import Int8Linear
from spectr_jax.utils.errors import UserError

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
SIZES = (
    *(
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("head_dim", "vocab_size", "max_position_embeddings"),
)
DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""What transformers takes for a field that a config.json leaves out, unlike one that it has as
null."""
NEEDED = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps"),
)
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "norm_attention": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "norm_q": "self_attn.q_norm.weight",
    "norm_k": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight",
    "norm_mlp": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
"""Parts of a model by Hugging Face's names; those of a layer have their `model.layers.LAYER.`
before them."""


UNUSED = r"lm_head\.weight|.*\.rotary_emb\.inv_freq"
"""Tensors that may be there and are not read: a head that is tied, and what older versions of
transformers saved."""


def load_llama(folder: pathlib.Path, dtype: str = "float32") -> Llama:
    """Reads a model of the family for decoding.

    Args:
      folder: with config.json and model.safetensors, or its parts and their index.
      dtype: "float32", "bfloat16" or "int8", whatever the files hold.

    Raises:
      UserError: a file is missing or damaged, or the model is of another kind.
    """
    config = llama_config(folder, "float32" if dtype == "int8" else dtype)
    tensors = Folder(folder)

    def part(name: str) -> np.ndarray:
        layer, dot, own = name.rpartition(".")
        return np.asarray(
            tensors[f"model.layers.{layer}.{NAMES[own]}" if dot else NAMES[own]], np.float32
        )

    model = fill(config, part, int8=dtype == "int8", source=str(folder))
    tensors.check_all_read(UNUSED)
    return model


def save_llama(
    folder: pathlib.Path, model: Llama, bos: int | None = None, eos: int | list[int] | None = None
) -> None:
    """Writes a model of the family in float32, config.json and model.safetensors, each whole or not
    at all.

    Args:
      folder: made if it is not there.
      model: what to write; not in int8, and with plain rotary positions.
      bos: id of BOS, for the config.
      eos: id of EOS, or several.

    Raises:
      UserError: the layout has no place for what the model is.
    """
    config = model.config
    if config.embed_rank or config.head_tokens or config.features:
        raise UserError(
            "a draft with embed_rank, head_tokens or features has no such layout; keep it in ours "
            "(save_weights)"
        )
    if (
        config.rope_divisors
        or (config.qkv_bias and config.qk_norm)
        or isinstance(model.blocks[0].qkv, Int8Linear)
    ):
        raise UserError(
            "a model with rope_divisors, biases beside norms, or int8 products has no such layout; "
            "give another"
        )
    kind = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"
    written = {
        "architectures": [
            {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind] + "ForCausalLM"
        ],
        "model_type": kind,
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "intermediate_size": config.mlp,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    save(folder, written, llama_tensors(model))


def llama_tensors(model: Llama) -> dict[str, np.ndarray]:
    """Returns float32 tensors by Hugging Face's names."""
    config, tensors = model.config, {}

    def put(layer: int | None, name: str, leaf: Any, transposed: bool = False) -> None:
        array = np.asarray(leaf, np.float32)
        prefix = "" if layer is None else f"model.layers.{layer}."
        tensors[prefix + NAMES[name]] = np.ascontiguousarray(array.T if transposed else array)

    put(None, "embed", model.embed.embedding[...])
    put(None, "norm", model.norm.scale[...])
    if model.head is not None:
        put(None, "head", model.head.kernel[...], transposed=True)
    ends = np.cumsum([config.heads, config.kv_heads]) * config.head_width
    for layer, block in enumerate(model.blocks):
        for name, part in zip("qkv", np.split(block.qkv.kernel[...], ends, axis=1), strict=True):
            put(layer, name, part, transposed=True)
        if block.qkv.bias is not None:
            for name, part in zip("qkv", np.split(block.qkv.bias[...], ends), strict=True):
                put(layer, f"{name}_bias", part)
        for name, part in zip(
            ("gate", "up"), np.split(block.gate_up.kernel[...], 2, axis=1), strict=True
        ):
            put(layer, name, part, transposed=True)
        for name in ("out", "down"):
            put(layer, name, getattr(block, name).kernel[...], transposed=True)
        for name in (
            "norm_attention",
            "norm_mlp",
            *(("norm_q", "norm_k") if config.qk_norm else ()),
        ):
            put(layer, name, getattr(block, name).scale[...])
    return tensors


def llama_config(folder: pathlib.Path, dtype: str) -> LlamaConfig:
    """Returns the shape that config.json gives; raises `UserError` for what is not understood."""
    given = read_config(folder)
    kind = given["model_type"]
    heads, width = given["num_attention_heads"], given["hidden_size"]
    head_width = given.get("head_dim", width // heads)
    theta, divisors = _rotary(folder, given, head_width)
    return LlamaConfig(
        layers=given["num_hidden_layers"],
        width=width,
        mlp=given["intermediate_size"],
        heads=heads,
        kv_heads=given.get("num_key_value_heads", heads),
        head_width=head_width,
        vocab_size=given["vocab_size"],
        context=given["max_position_embeddings"],
        rope_theta=theta,
        rope_divisors=divisors,
        norm_epsilon=given["rms_norm_eps"],
        tied=given.get("tie_word_embeddings", False),
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        dtype=dtype,
    )


def read_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the config.json of a model of the family; raises `UserError` if it is of another,
    damaged, or lacks something."""
    given = read_json(folder, nulls=True)
    given = {**DEFAULTS.get(str(given.get("model_type")), {}), **given}
    given = {name: value for name, value in given.items() if value is not None}
    check_sizes(folder, given, SIZES)
    for name, known in (("model_type", MODEL_TYPES), ("hidden_act", ("silu",))):
        if given.get(name, known[0] if name == "hidden_act" else None) not in known:
            raise UserError(
                f"{str(folder)!r} has {name}={given.get(name)!r}; read are {', '.join(known)}"
            )
    if missing := [name for name in NEEDED if name not in given]:
        raise UserError(
            f"{str(folder)!r} has a config.json without {missing[0]!r}; save or fetch it again"
        )
    _check_understood(folder, given)
    return given


def _check_understood(folder: pathlib.Path, given: dict[str, Any]) -> None:
    """Raises `UserError` for what changes the computation in a way that `Llama` does not have."""
    epsilon = given.get("rms_norm_eps", 0.0)
    if type(epsilon) not in (int, float) or not 0 <= epsilon < math.inf:
        refuse(folder, given, "rms_norm_eps", "a number from 0 on")
    for name in ("tie_word_embeddings", "use_sliding_window"):
        if type(given.get(name, False)) is not bool:
            refuse(folder, given, name, "true or false")
    windows = given.get("model_type") == "mistral" or given.get("use_sliding_window", False)
    if windows:
        check_sizes(folder, given, ("sliding_window",))
    window, context = given.get("sliding_window", math.inf), given.get("max_position_embeddings", 0)
    for name, understood in (
        ("attention_bias", not given.get("attention_bias", False)),
        ("mlp_bias", not given.get("mlp_bias", False)),
        ("sliding_window", not windows or window >= context),
        ("quantization_config", "quantization_config" not in given),
    ):
        if not understood:
            raise UserError(
                f"{str(folder)!r} has {name}={given[name]!r}, which is not read; give another model"
            )


def _renamed(scaling: dict[str, Any]) -> dict[str, Any]:
    """Returns the same with its kind under the newer of the two names."""
    kind = {"rope_type": scaling["type"]} if "type" in scaling else {}
    return kind | {name: value for name, value in scaling.items() if name != "type"}


def _rotary(
    folder: pathlib.Path, given: dict[str, Any], head_width: int
) -> tuple[float, tuple[float, ...]]:
    """Returns the base of the rotary positions and their divisors; newer files have both in
    `rope_parameters`."""
    field = "rope_parameters" if "rope_parameters" in given else "rope_scaling"
    scaling = given.get(field, {})
    if not isinstance(scaling, dict):
        refuse(folder, given, field, "an object")
    scaling, other = _renamed(scaling), given.get("rope_scaling")
    if isinstance(other, dict) and any(
        scaling.get(name) != value for name, value in _renamed(other).items()
    ):
        raise UserError(
            f"{str(folder)!r} has rope_scaling={other} beside other rope_parameters; keep one in "
            "its config.json"
        )
    if "factor" in scaling and "rope_type" not in scaling:
        refuse(folder, given, field, "one that names its rope_type")

    def number(name: str) -> float:
        if type(value := scaling[name]) not in (int, float) or not 0 < value < math.inf:
            refuse(folder, scaling, name, "a positive number")
        return float(value)

    kind = scaling.get("rope_type", "default")
    if scaling.get("partial_rotary_factor", given.get("partial_rotary_factor", 1)) != 1:
        raise UserError(
            f"{str(folder)!r} has partial_rotary_factor, which is not read; give another model"
        )
    scaling = {"rope_theta": given.get("rope_theta", 10_000.0), **scaling}
    theta = number("rope_theta")
    if kind == "default":
        return theta, ()
    try:
        if kind == "linear":
            return theta, (number("factor"),) * (head_width // 2)
        if kind == "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if low >= high:
                refuse(folder, scaling, "low_freq_factor", f"below high_freq_factor={high}")
            context = int(number("original_max_position_embeddings"))
            return theta, llama3_divisors(
                theta, head_width, factor=number("factor"), low=low, high=high, context=context
            )
    except KeyError as error:
        raise UserError(
            f"{str(folder)!r} has a rope_scaling without {error}; save or fetch it again"
        ) from error
    raise UserError(f"{str(folder)!r} has rope_type={kind!r}; read are default, linear, llama3")
