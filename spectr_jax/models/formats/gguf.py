"""GGUF files of the Llama family."""

import math
import re
from typing import Any

import numpy as np
from jax.sharding import Mesh

from spectr_jax.models import rotary
from spectr_jax.models.formats.folder import check_fields, check_known, refused
from spectr_jax.models.formats.gguf_file import GGUF
from spectr_jax.models.formats.parts import fill, llama_arrays, rows_in_joined, with_rest_in_halves
from spectr_jax.models.formats.tensors import Unread, rows_of
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils.errors import UserError

ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3", "gemma4")
NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "norm_attention": "attn_norm.weight",
    "norm_attended": "post_attention_norm.weight",
    "norm_mlp": "ffn_norm.weight",
    "norm_down": "post_ffw_norm.weight",
    "out": "attn_output.weight",
    **{name: f"attn_{name}.weight" for name in "qkv"},
    **{f"{name}_bias": f"attn_{name}.bias" for name in "qkv"},
    **{f"norm_{name}": f"attn_{name}_norm.weight" for name in "qk"},
    **{name: f"ffn_{name}.weight" for name in ("gate", "up", "down")},
    "layer_scale": "layer_output_scale.weight",
}
"""llama.cpp's names of the parts of a model; `blk.LAYER.` precedes those of a layer."""
FUSED = re.compile(r"(blk\.\d+\.)(attn|ffn)_(q|k|v|gate|up)\.(weight|bias)")
"""The names of parts that Phi-3 stores joined, as `attn_qkv` and `ffn_up`."""
DIVISORS, SHORT, LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)
"""Tensors of divisors of the rotary frequencies; the last two are LongRoPE's."""
NOT_ROTATED = 1e30
"""Divisors of Gemma 4's files for pairs of channels that are not rotated."""
FIELDS = {
    "a positive integer": (
        *("context_length", "embedding_length", "block_count", "feed_forward_length"),
        *("attention.head_count", "attention.key_length", "attention.key_length_swa"),
        *("rope.dimension_count", "rope.scaling.original_context_length"),
    ),
    "a positive number": ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.attn_factor"),
    "a non-negative number": (
        *("rope.scaling.factor", "rope.scale_linear", "attention.layer_norm_rms_epsilon"),
        *("attn_logit_softcapping", "final_logit_softcapping", "rope.scaling.yarn_attn_factor"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    ),
}
"""Fields of the metadata of each kind (`folder.KINDS`)."""
KNOWN: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "rope.scaling.type": ("linear", "none", "yarn", "longrope"),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    # What Gemma 4's small models add.
    "embedding_length_per_layer_input": (0,),
    "attention.shared_kv_layers": (0,),
}
"""The supported values of fields."""
WINDOW, CAPS = {"gemma2": 4096}, {"gemma2": (50.0, 30.0)}
"""The window, and the caps of scores and logits, unless the file says otherwise."""
ALTERNATING = {"gemma2": 2, "gemma3": 6, "gemma4": None}
"""The period of the layers without a window, unless the file says otherwise."""
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Number of layers of Gemma's models of 27B, whose scores are divided by another number."""


def load_gguf(file: GGUF, dtype: str = "float32", mesh: Mesh | None = None) -> Llama:
    """Reads a model of the Llama family for decoding.

    Args:
      file: the open file.
      dtype: "float32", "bfloat16" or "int8", whatever the file holds.
      mesh: as in `fill`.

    Raises:
      UserError: the file lacks a part, or its model is not supported; or as `fill`.
    """
    config, arch = gguf_config(file), file.need("general.architecture")
    rotated = config.head_width
    if arch == "phi3":
        rotated = file.get(f"{arch}.rope.dimension_count", rotated)

    def tensor(name: str) -> Unread:
        array = _stored(config, file, name)
        # `fill` reads whole heads, and refuses tensors of other shapes.
        if arch == "llama" and name.split(".")[-2] in ("attn_q", "attn_k"):
            return array.then(lambda rows: _in_halves(rows, config.head_width))
        if rotated < config.head_width and name.split(".")[-2] in ("attn_q", "attn_k"):
            return array.then(lambda rows: with_rest_in_halves(rows, config.head_width, rotated))
        return array

    arrays = llama_arrays(config, tensor, NAMES, "blk.{}.", str(file.path))
    model = fill(config, arrays, dtype, source=str(file.path), mesh=mesh)
    file.check_all_read({DIVISORS, SHORT, LONG})
    return model


def _stored(config: LlamaConfig, file: GGUF, name: str) -> Unread:
    """Returns a tensor, or its part of one that Phi-3 stores joined; raises as `GGUF.tensor`."""
    if (found := FUSED.fullmatch(name)) is not None:
        layer, kind, part, of = found.groups()
        stored = f"{layer}{'attn_qkv' if kind == 'attn' else 'ffn_up'}.{of}"
        first, count, total = rows_in_joined(config, part)
        alone = name if kind == "attn" else f"{layer}ffn_gate.{of}"
        if alone not in file.tensors and stored in file.tensors:
            joined = file.tensor(stored)
            if joined.shape[0] == total:
                return rows_of(joined, first, count)
    return file.tensor(name)


def gguf_config(file: GGUF) -> LlamaConfig:
    """Returns the shape of a file's model; raises `UserError` if it is not supported."""
    path, arch = str(file.path), file.need("general.architecture")
    check_known(path, file, {"general.architecture": ARCHITECTURES})

    def need(name):
        return file.need(f"{arch}.{name}")

    def get(name, default=None):
        return file.get(f"{arch}.{name}", default)

    if (parts := file.get("split.count", 1)) != 1:
        raise UserError(f"{path!r} is one of {parts!r:.40} parts; merge them with llama-gguf-split")
    check_fields(path, file, FIELDS, prefix=f"{arch}.")
    layers, heads, width = map(need, ("block_count", "attention.head_count", "embedding_length"))
    if (last := f"blk.{layers - 1}.{NAMES['norm_attention']}") not in file.tensors:
        raise UserError(f"{path!r} lacks {last!r}, a part of its model; fetch it again")
    full_width = get("attention.key_length", width // heads)
    head_width = get("attention.key_length_swa", full_width)
    widths = {
        "attention.value_length": (full_width,),
        "attention.value_length_swa": (head_width,),
        "rope.dimension_count_swa": (head_width,),
    }
    if arch != "phi3":
        widths["rope.dimension_count"] = (full_width,)
    check_known(path, file, KNOWN | widths, prefix=f"{arch}.")
    context, positions = _rotary(file, arch, full_width)
    windows = _windows(file, arch, layers, context)
    kv_heads, full_kv_heads = _kv_heads(file, arch, windows or (0,) * layers)
    own = get("rope.freq_base_swa", 10_000.0 if arch in ("gemma3", "gemma4") else 0.0)
    plain = {"rope_theta": own, "rope_divisors": (), "rope_scale": 1.0}
    if windows and own and positions != plain:
        positions |= {"window_rope_theta": own} if 0 in windows else plain
    first_full = windows.index(0) if 0 in windows else 0
    return LlamaConfig(
        layers=layers,
        width=width,
        mlp=need("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        vocab_size=len(file.need("tokenizer.ggml.tokens")),
        context=context,
        **positions,
        windows=windows,
        full_kv_heads=full_kv_heads,
        full_head_width=full_width if full_width != head_width else 0,
        keys_as_values=arch == "gemma4" and f"blk.{first_full}.{NAMES['v']}" not in file.tensors,
        norm_epsilon=need("attention.layer_norm_rms_epsilon"),
        tied=NAMES["head"] not in file.tensors,
        qkv_bias=f"blk.0.{NAMES['q_bias']}" in file.tensors,
        qk_norm=f"blk.0.{NAMES['norm_q']}" in file.tensors,
        post_norms=f"blk.0.{NAMES['norm_down']}" in file.tensors,
        layer_scale=f"blk.0.{NAMES['layer_scale']}" in file.tensors,
        **(_of_gemma(file, arch) if arch.startswith("gemma") else {}),
    )


def _of_gemma(file: GGUF, arch: str) -> dict[str, Any]:
    """Returns the fields of `LlamaConfig` that only Gemma's models have."""
    width = file.need(f"{arch}.embedding_length")
    fields: dict[str, Any] = {
        "activation": "gelu_tanh",
        "embed_scale": math.sqrt(width),
        "logit_cap": file.get(f"{arch}.final_logit_softcapping", CAPS.get(arch, (0.0, 0.0))[1]),
    }
    if arch == "gemma2":
        fields["attention_cap"] = file.get(f"{arch}.attn_logit_softcapping", CAPS[arch][0])
    if arch == "gemma4":
        fields |= {"query_width": 1.0, "value_norm": True}
    elif file.need(f"{arch}.block_count") == LARGEST.get(arch):
        fields["query_width"] = float(width // file.need(f"{arch}.attention.head_count"))
    return fields


def _windows(file: GGUF, arch: str, layers: int, context: int) -> tuple[int, ...]:
    """Returns the window of each layer, 0 for none; empty if no layer has one."""
    path, name = str(file.path), f"{arch}.attention.sliding_window"
    window = file.get(name, WINDOW.get(arch, 0))
    if type(window) is not int or window < 0:
        raise refused(path, name, window, "a number of tokens")
    if arch.startswith("qwen") and 0 < window < context:  # Which layers have it is not known.
        raise refused(path, name, window, f"at least the context of {context}")
    if arch not in ALTERNATING:
        slides = [arch != "gemma" and window < context] * layers
    elif type(pattern := file.get(f"{name}_pattern", ALTERNATING[arch])) is int:
        slides = [pattern < 1 or layer % pattern < pattern - 1 for layer in range(layers)]
    elif isinstance(pattern, list) and len(pattern) == layers:
        slides = [bool(each) for each in pattern]
    else:
        wanted = f"a number of layers, or {layers} values that say which have a window"
        raise refused(path, f"{name}_pattern", pattern, wanted)
    return tuple(window * each for each in slides) if window and any(slides) else ()


def _kv_heads(file: GGUF, arch: str, windows: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of key and value heads, and that of the layers without a window if theirs
    differs, or else 0."""
    name = f"{arch}.attention.head_count_kv"
    given = file.get(name, file.need(f"{arch}.attention.head_count"))
    each = given if isinstance(given, list) else [given] * len(windows)
    if len(each) == len(windows):
        counts = dict(zip(windows, each, strict=True))  # One for each kind of layers.
        whole = all(type(count) is int and count > 0 for count in each)
        if whole and each == [counts[window] for window in windows]:
            first, full = counts[max(windows)], counts.get(0, 0)
            return first, full if full != first else 0
    wanted = (
        "a positive integer, or one for each layer, equal in those with a window and in the others"
    )
    raise refused(str(file.path), name, given, wanted)


def _rotary(file: GGUF, arch: str, head_width: int) -> tuple[int, dict[str, Any]]:
    """Returns the context and the fields of `LlamaConfig` for rotary positions.

    As in llama.cpp, a factor without a type of scaling is linear, and divides the frequencies
    besides the file's tensor of divisors.
    """

    def get(name, default=None):
        return file.get(f"{arch}.rope.{name}", default)

    context, base = file.need(f"{arch}.context_length"), get("freq_base", 10_000.0)
    channels, kind = get("dimension_count", head_width), get("scaling.type", "linear")
    if channels % 2 or channels > head_width:
        wanted = f"an even number up to the {head_width} channels of a head"
        raise refused(str(file.path), f"{arch}.rope.dimension_count", channels, wanted)
    factor = get("scaling.factor", get("scale_linear")) or 1.0
    original = get("scaling.original_context_length", context)
    scale, divisors = get("scaling.attn_factor", 1.0), np.ones(channels // 2)
    if kind == "yarn":
        turns = {
            "slow": get("scaling.yarn_beta_slow", 1.0),
            "fast": get("scaling.yarn_beta_fast", 32.0),
        }
        divisors *= rotary.yarn_divisors(base, channels, factor=factor, context=original, **turns)
        scale *= get("scaling.yarn_attn_factor", rotary.yarn_scale(factor))
        context = max(context, int(factor * original))  # Some files keep the shorter one.
    elif kind != "none":
        divisors *= factor
    if SHORT in file.tensors:
        context = min(context, original)  # The divisors of longer sequences are not used.
    for name in (DIVISORS, SHORT):
        if name in file.tensors:
            if file.tensor(name).shape != divisors.shape:
                raise UserError(
                    f"{str(file.path)!r} has {name} of shape {file.tensor(name).shape}: must be "
                    f"{divisors.shape}; fetch it again"
                )
            divisors *= file.tensor(name)[:]
    found = np.where(divisors < NOT_ROTATED, divisors, np.inf).tolist()
    if channels < head_width:
        found = rotary.of_first_channels(base, head_width, channels, found)
    plain = all(divisor == 1 for divisor in found)
    return context, {
        "rope_theta": base,
        "rope_divisors": () if plain else tuple(found),
        "rope_scale": scale,
    }


def _in_halves(part: np.ndarray, head_width: int) -> np.ndarray:
    """Returns a kernel [outputs, inputs] or bias with the channels of a rotary pair D / 2 apart.

    llama.cpp stores them next to each other.
    """
    pairs = part.reshape(-1, head_width // 2, 2, *part.shape[1:])
    return pairs.swapaxes(1, 2).reshape(part.shape)
