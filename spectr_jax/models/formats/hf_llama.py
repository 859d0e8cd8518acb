"""Reads and writes models of the Llama family in Hugging Face's layout."""

import math
import pathlib
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spectr_jax.models.formats.folder import Folder, check_fields, check_known, refused, save
from spectr_jax.models.formats.parts import fill, llama_arrays
from spectr_jax.models.formats.tensors import Unread
from spectr_jax.models.llama import Llama, LlamaConfig, llama3_divisors
from spectr_jax.models.quantized import Int8Linear
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import read_json

KNOWN: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama", "mistral", "qwen2", "qwen3"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (None,),
}
"""The supported values of fields."""
KNOWN_ROPE = {"rope_type": ("default", "linear", "llama3"), "partial_rotary_factor": (1,)}
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
FIELDS = {
    "a positive integer": tuple(set(SHAPE.values()) - {"rms_norm_eps", "tie_word_embeddings"}),
    "a non-negative number": ("rms_norm_eps",),
    "true or false": ("tie_word_embeddings", "use_sliding_window"),
}
ROPE_NUMBERS = (
    *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)
DEFAULTS: dict[str, dict[str, int]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
"""Defaults of transformers for fields missing from config.json; a null is not replaced."""
NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "norm_attention": "input_layernorm.weight",
    "norm_mlp": "post_attention_layernorm.weight",
    "out": "self_attn.o_proj.weight",
    **{name: f"self_attn.{name}_proj.weight" for name in "qkv"},
    **{f"{name}_bias": f"self_attn.{name}_proj.bias" for name in "qkv"},
    **{f"norm_{name}": f"self_attn.{name}_norm.weight" for name in "qk"},
    **{name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
"""Hugging Face's names of the parts of a model; `LAYER` precedes those of a layer."""
LAYER = "model.layers.{}."
UNUSED = r"lm_head\.weight|.*\.rotary_emb\.inv_freq"
"""Tensors that are ignored: a head that is tied, and buffers of older versions of transformers."""


def load_llama(folder: pathlib.Path, dtype: str = "float32", mesh: Mesh | None = None) -> Llama:
    """Reads a model of the family for decoding.

    Args:
      folder: has config.json and model.safetensors, or its parts and their index.
      dtype: "float32", "bfloat16" or "int8", whatever the files hold.
      mesh: as in `fill`.

    Raises:
      UserError: a file is missing or damaged, or the model is not supported; or as `fill`.
    """
    config = llama_config(folder)
    tensors = Folder(folder)

    def tensor(name: str) -> Unread:
        return tensors.unread(name).then(lambda rows: np.asarray(rows, np.float32))

    arrays = llama_arrays(config, tensor, NAMES, LAYER, str(folder))
    model = fill(config, arrays, dtype, source=str(folder), mesh=mesh)
    tensors.check_all_read(UNUSED)
    return model


def save_llama(
    folder: pathlib.Path, model: Llama, bos: int | None = None, eos: int | list[int] | None = None
) -> None:
    """Writes a model in float32: config.json and model.safetensors, each atomically.

    Args:
      folder: made if it does not exist.
      model: the model, not in int8, and with plain rotary positions.
      bos: id of BOS, for the config.
      eos: id of EOS, or several.

    Raises:
      UserError: the layout cannot represent the model.
    """
    config = model.config
    remedy = "cannot be written to a Hugging Face folder; use save_weights"
    for name in ("embed_rank", "head_tokens", "features", "rope_divisors"):
        if value := getattr(config, name):
            raise UserError(f"{name}={value!r:.40}: {remedy}")
    if config.shards > 1:
        raise UserError(f"shards={config.shards}: is split over devices; load it without a mesh")
    if (config.qkv_bias and config.qk_norm) or isinstance(model.blocks[0].qkv, Int8Linear):
        raise UserError(f"a model with qkv_bias and qk_norm, or an int8 model {remedy}")
    kind = "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama"
    written = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **{theirs: getattr(config, ours) for ours, theirs in SHAPE.items()},
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    save(folder, written, llama_tensors(model))


def llama_tensors(model: Llama) -> dict[str, np.ndarray]:
    """Returns float32 tensors by Hugging Face's names."""
    config, tensors = model.config, {}

    def put(layer: int | None, name: str, leaf: Any) -> None:
        """Adds a tensor. Kernels, the matrices besides the embedding, are [outputs, inputs]."""
        array = np.asarray(leaf, np.float32)
        prefix = "" if layer is None else LAYER.format(layer)
        transposed = array.ndim == 2 and name != "embed"
        tensors[prefix + NAMES[name]] = np.ascontiguousarray(array.T if transposed else array)

    put(None, "embed", model.embed.embedding[...])
    put(None, "norm", model.norm.scale[...])
    if model.head is not None:
        put(None, "head", model.head.kernel[...])
    ends = np.cumsum([config.heads, config.kv_heads]) * config.head_width
    norms = ("norm_attention", "norm_mlp", *(("norm_q", "norm_k") if config.qk_norm else ()))
    for layer, block in enumerate(model.blocks):
        for name, part in zip("qkv", np.split(block.qkv.kernel[...], ends, axis=1), strict=True):
            put(layer, name, part)
        if block.qkv.bias is not None:
            for name, part in zip("qkv", np.split(block.qkv.bias[...], ends), strict=True):
                put(layer, f"{name}_bias", part)
        gate, up = np.split(block.gate_up.kernel[...], 2, axis=1)
        put(layer, "gate", gate)
        put(layer, "up", up)
        for name in ("out", "down"):
            put(layer, name, getattr(block, name).kernel[...])
        for name in norms:
            put(layer, name, getattr(block, name).scale[...])
    return tensors


def llama_config(folder: pathlib.Path, given: dict[str, Any] | None = None) -> LlamaConfig:
    """Returns the shape that config.json gives; takes and raises what `read_config` does."""
    given = read_config(folder, given)
    heads, width, kind = given["num_attention_heads"], given["hidden_size"], given["model_type"]
    optional = {"kv_heads": heads, "head_width": width // heads, "tied": False}
    shape = optional | {ours: given[theirs] for ours, theirs in SHAPE.items() if theirs in given}
    theta, divisors = _rotary(folder, given, shape["head_width"])
    return LlamaConfig(
        **shape,
        rope_theta=theta,
        rope_divisors=divisors,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
    )


def read_config(folder: pathlib.Path, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the fields of a model's config.json.

    Args:
      folder: of the model.
      given: fields to be taken instead of those of the file; None for the file's.

    Raises:
      UserError: the file is missing, damaged or incomplete, or the model is not supported.
    """
    source, given = str(folder), given or read_json(folder / "config.json")
    given = {**DEFAULTS.get(str(given.get("model_type")), {}), **given}
    given = {name: value for name, value in given.items() if value is not None}
    check_known(source, {"model_type": None, **given}, KNOWN)
    check_fields(source, given, FIELDS)
    if missing := [name for name in tuple(SHAPE.values())[:-3] if name not in given]:
        raise UserError(f"{source!r} has a config.json without {missing[0]!r}; fetch it again")
    if given["model_type"] == "mistral" or given.get("use_sliding_window", False):
        check_fields(source, given, {"a positive integer": ("sliding_window",)})
        window, context = given.get("sliding_window", math.inf), given["max_position_embeddings"]
        if window < context:
            wanted = f"at least max_position_embeddings={context}"
            raise refused(source, "sliding_window", window, wanted)
    return given


def _rotary(
    folder: pathlib.Path, given: dict[str, Any], head_width: int
) -> tuple[float, tuple[float, ...]]:
    """Returns the base of the rotary positions and their divisors.

    Newer files have both in `rope_parameters`, which some nest by kind of layer. Older ones have the
    divisors in `rope_scaling`.
    """
    source = str(folder)

    def scaling_of(field):
        if not isinstance(scaling := given.get(field, {}), dict):
            raise refused(source, field, scaling, "an object")
        kinds = [value for value in scaling.values() if isinstance(value, dict)]
        if kinds and (len(kinds) < len(scaling) or any(kind != kinds[0] for kind in kinds)):
            raise refused(
                source, field, scaling, "one object, or equal objects for all kinds of layer"
            )
        scaling = kinds[0] if kinds else scaling
        renamed = {"rope_type": scaling.get("type"), **scaling}
        return {
            name: value for name, value in renamed.items() if name != "type" and value is not None
        }

    field = "rope_parameters" if "rope_parameters" in given else "rope_scaling"
    scaling = scaling_of(field)
    if any(scaling.get(name) != value for name, value in scaling_of("rope_scaling").items()):
        wanted = "equal to rope_parameters, or absent"
        raise refused(source, "rope_scaling", given["rope_scaling"], wanted)
    if "factor" in scaling and "rope_type" not in scaling:
        raise refused(source, field, given[field], "an object with a rope_type")
    outside = {
        name: given[name] for name in ("rope_theta", "partial_rotary_factor") if name in given
    }
    scaling = {"rope_theta": 10_000.0, "rope_type": "default", **outside, **scaling}
    check_known(source, scaling, KNOWN_ROPE)
    check_fields(source, scaling, {"a positive number": ROPE_NUMBERS})
    kind, theta = scaling["rope_type"], float(scaling["rope_theta"])
    if kind == "default":
        return theta, ()
    try:
        factor = float(scaling["factor"])
        if kind == "linear":
            return theta, (factor,) * (head_width // 2)
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        context = int(scaling["original_max_position_embeddings"])
    except KeyError as error:
        raise UserError(f"{source!r} has a {field} without {error}; fetch it again") from error
    if low >= high:
        raise refused(source, "low_freq_factor", low, f"below high_freq_factor={high}")
    return theta, llama3_divisors(
        theta, head_width, factor=factor, low=low, high=high, context=context
    )
