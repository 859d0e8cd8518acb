"""Reads and writes models of the Llama family in Hugging Face's layout."""

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spectr_jax.models.formats.folder import Folder, save
from spectr_jax.models.formats.hf_config import SHAPE, Shape, read_shape
from spectr_jax.models.formats.parts import fill, llama_arrays, rows_in_joined, with_rest_in_halves
from spectr_jax.models.formats.tensors import Unread, rows_of
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.quantized import Int8Linear
from spectr_jax.utils.errors import UserError

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
    "layer_scale": "layer_scalar",
}
"""Hugging Face's names of the parts of a model; `LAYER` precedes those of a layer."""
POST_NORMS = {
    "norm_attended": "post_attention_layernorm.weight",
    "norm_mlp": "pre_feedforward_layernorm.weight",
    "norm_down": "post_feedforward_layernorm.weight",
}
"""The names in models that have norms after each part too."""
MODEL, LAYER = "model.", "model.layers.{}."
STARTS = ("model.language_model.", "language_model.model.", "language_model.")
"""The beginnings of names that replace `MODEL` in models of text and images."""
FUSED = re.compile(r"(.*\.)(q|k|v|gate|up)_proj\.weight")
"""The names of parts that Phi-3 stores joined, as `qkv` and `gate_up`."""
WRITTEN = (*SHAPE, "rope_theta", "qkv_bias", "qk_norm", "dtype")
"""The fields of `LlamaConfig` that `save_llama` can write."""
UNUSED = (
    r"(.*\.)?lm_head\.weight|.*\.rotary_emb\.inv_freq"
    r"|(model\.)?(vision|audio|multi_modal|embed_vision|embed_audio).*"
)
"""Tensors that are ignored: a head that is tied, buffers of older versions of transformers, and the
parts for images and sound."""


def load_llama(folder: pathlib.Path, dtype: str = "float32", mesh: Mesh | None = None) -> Llama:
    """Reads a model of the family for decoding.

    Args:
      folder: has config.json and model.safetensors, or its parts and their index.
      dtype: "float32", "bfloat16" or "int8", whatever the files hold.
      mesh: as in `fill`.

    Raises:
      UserError: a file is missing or damaged, or the model is not supported; or as `fill`.
    """
    shape, tensors = read_shape(folder), Folder(folder)
    arrays = hf_arrays(shape, tensors, str(folder))
    model = fill(shape.config, arrays, dtype, source=str(folder), mesh=mesh)
    tensors.check_all_read(UNUSED)
    return model


def hf_arrays(shape: Shape, tensors: Folder, source: str) -> Iterator[tuple[str, Unread]]:
    """Returns an iterator over the arrays of a folder's model, for `fill`; raises as `llama_arrays`."""
    config, rotated = shape.config, shape.rotated
    start = next((each for each in STARTS if f"{each}embed_tokens.weight" in tensors), MODEL)

    def tensor(name: str) -> Unread:
        name = start + name.removeprefix(MODEL) if name.startswith(MODEL) else name
        found = _stored(config, tensors, name)
        found = found.then(lambda rows: np.asarray(rows, np.float32))
        if shape.adds_one and name.endswith("norm.weight"):
            return found.then(lambda rows: 1 + rows)
        if rotated < config.head_width and name.endswith(("q_proj.weight", "k_proj.weight")):
            # `fill` reads whole heads.
            return found.then(lambda rows: with_rest_in_halves(rows, config.head_width, rotated))
        return found

    names = NAMES | (POST_NORMS if config.post_norms else {})
    return llama_arrays(config, tensor, names, LAYER, source)


def _stored(config: LlamaConfig, tensors: Folder, name: str) -> Unread:
    """Returns a tensor, or its part of one that Phi-3 stores joined; raises as `Folder.unread`."""
    if (found := FUSED.fullmatch(name)) is not None and name not in tensors:
        before, part = found.groups()
        joined = f"{before}{'qkv' if part in 'qkv' else 'gate_up'}_proj.weight"
        if joined in tensors:
            first, count, _ = rows_in_joined(config, part)
            return rows_of(tensors.unread(joined), first, count)
    return tensors.unread(name)


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
    remedy = "cannot be written to a Hugging Face folder; keep the folder or file that it is from"
    if config.shards > 1:
        raise UserError(f"shards={config.shards}: is split over devices; load it without a mesh")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in WRITTEN and value != field.default:
            raise UserError(f"{field.name}={value!r:.40}: {remedy}")
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
