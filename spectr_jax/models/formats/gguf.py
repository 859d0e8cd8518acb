"""GGUF files, as llama.cpp reads them: models of the Llama family, with any quantisation that the
library `gguf` knows."""

import math
import pathlib
from typing import Any

import gguf
import numpy as np

from spectr_jax.models.formats.parts import fill
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import check_fetched

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "norm_attention": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "norm_q": "attn_q_norm.weight",
    "norm_k": "attn_k_norm.weight",
    "out": "attn_output.weight",
    "norm_mlp": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
"""Parts of a model by llama.cpp's names; those of a layer have its `blk.LAYER.` before them."""
ROPE_DIVISORS = "rope_freqs.weight"
SIZES = (
    *(
        "context_length",
        "embedding_length",
        "block_count",
        "feed_forward_length",
        "attention.head_count",
    ),
    *("attention.head_count_kv", "attention.key_length", "rope.dimension_count"),
)


NUMBERS = {
    "rope.freq_base": 1,
    "rope.scaling.factor": 0,
    "rope.scale_linear": 0,
    "attention.layer_norm_rms_epsilon": 0,
}
"""Real numbers of the metadata, and the least that each may be."""


class _Reader(gguf.GGUFReader):
    """With views that are plain arrays: a vocabulary has 150,000, and those of memory maps take
    three times as long."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


class GGUF:
    """An open GGUF file: its metadata, and its tensors, each read when it is asked for."""

    def __init__(self, path: pathlib.Path):
        """Opens `path`; raises `UserError` if it is not a complete GGUF file."""
        self.path = path
        try:
            check_fetched(path)
            reader = _Reader(path)
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._fields = reader.fields
        except UserError:
            raise
        except (OSError, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
            raise UserError(
                f"{str(path)!r} is not a GGUF file that can be read ({error}); fetch it again"
            ) from error

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of the metadata; raises `UserError` if it is damaged."""
        field = self._fields.get(name)
        try:
            return default if field is None else field.contents()
        except (ValueError, IndexError) as error:  # UnicodeDecodeError among them.
            raise UserError(
                f"{str(self.path)!r} has a damaged {name!r} in its metadata ({error}); fetch it "
                "again"
            ) from error

    def need(self, name: str) -> Any:
        """Returns a value of the metadata that must be there; raises `UserError` if it is not."""
        if name not in self._fields:
            raise UserError(f"{str(self.path)!r} lacks {name!r} in its metadata; fetch it again")
        return self.get(name)

    def tensor(self, name: str) -> np.ndarray:
        """Returns a tensor in float32; raises KeyError if there is none, `UserError` if it cannot
        be dequantised."""
        found = self.tensors[name]
        try:  # Not from the reader's map of the file, whose pages would stay in memory beside the model.
            stored = np.fromfile(
                self.path, found.data.dtype, found.data.size, offset=found.data_offset
            )
            return np.asarray(
                gguf.dequantize(stored.reshape(found.data.shape), found.tensor_type), np.float32
            )
        except (NotImplementedError, ValueError) as error:
            kind = found.tensor_type.name
            raise UserError(
                f"{str(self.path)!r} has {name} in {kind}, which is not read ({error}); give "
                "another"
            ) from error


def load_gguf(file: GGUF, dtype: str = "float32") -> Llama:
    """Reads a model of the Llama family for decoding.

    Args:
      file: open.
      dtype: "float32", "bfloat16" or "int8", whatever the file holds.

    Raises:
      UserError: the file lacks something, or its model is of another kind.
    """
    config = gguf_config(file, "float32" if dtype == "int8" else dtype)
    interleaved = file.need("general.architecture") == "llama"
    unread = set(file.tensors) - {ROPE_DIVISORS}

    def part(name: str) -> np.ndarray:
        layer, dot, own = name.rpartition(".")
        theirs = f"blk.{layer}.{NAMES[own]}" if dot else NAMES[own]
        array = file.tensor(theirs)
        unread.discard(theirs)
        if (
            interleaved
            and own in ("q", "k", "q_bias", "k_bias")
            and len(array) % config.head_width == 0
        ):
            return _in_halves(array, config.head_width)
        return array

    model = fill(config, part, int8=dtype == "int8", source=str(file.path))
    if unread:  # Nothing else in the file says that a model has such parts.
        raise UserError(
            f"{str(file.path)!r} has {min(unread)}, a part that is not read; give another model"
        )
    return model


def gguf_config(file: GGUF, dtype: str) -> LlamaConfig:
    """Returns the shape of a file's model; raises `UserError` for what is not understood."""
    kind = file.need("general.architecture")
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{str(file.path)!r} is of architecture {kind!r}; read are {', '.join(ARCHITECTURES)}"
        )

    def need(name):
        return file.need(f"{kind}.{name}")

    def get(name, default=None):
        return file.get(f"{kind}.{name}", default)

    if (parts := file.get("split.count", 1)) != 1:
        raise UserError(
            f"{str(file.path)!r} is one of {parts!r:.40} parts; merge them with llama-gguf-split"
        )
    for name in SIZES:
        if type(size := get(name, 1)) is not int or size < 1:
            raise UserError(
                f"{str(file.path)!r} has {kind}.{name}={size!r:.40}, not one positive integer; "
                "give another model"
            )
    context = need("context_length")
    window = get("attention.sliding_window", context)
    for name, understood in (
        ("expert_count", get("expert_count", 0) == 0),
        ("attention.sliding_window", type(window) is int and window >= context),
        ("rope.scaling.type", get("rope.scaling.type", "none") in ("none", "linear")),
    ):
        if not understood:
            raise UserError(
                f"{str(file.path)!r} has {kind}.{name}={get(name)!r}, which is not read; give "
                "another model"
            )
    for name, least in NUMBERS.items():
        if type(number := get(name, 1)) not in (int, float) or not least <= number < math.inf:
            raise UserError(
                f"{str(file.path)!r} has {kind}.{name}={number!r:.40}, not a number from {least} "
                "on; give another model"
            )
    heads, width = need("attention.head_count"), need("embedding_length")
    head_width = get("attention.key_length", width // heads)
    if get("rope.dimension_count", head_width) != head_width:
        turned = get("rope.dimension_count")
        raise UserError(
            f"{str(file.path)!r} turns {turned} of {head_width} channels of a head; give another "
            "model"
        )
    return LlamaConfig(
        layers=need("block_count"),
        width=width,
        mlp=need("feed_forward_length"),
        heads=heads,
        kv_heads=get("attention.head_count_kv", heads),
        head_width=head_width,
        vocab_size=len(file.need("tokenizer.ggml.tokens")),
        context=context,
        rope_theta=get("rope.freq_base", 10_000.0),
        rope_divisors=_divisors(file, kind, head_width),
        norm_epsilon=need("attention.layer_norm_rms_epsilon"),
        tied=NAMES["head"] not in file.tensors,
        qkv_bias=f"blk.0.{NAMES['q_bias']}" in file.tensors,
        qk_norm=f"blk.0.{NAMES['norm_q']}" in file.tensors,
        dtype=dtype,
    )


def _divisors(file: GGUF, kind: str, head_width: int) -> tuple[float, ...]:
    """Returns those of the tensor, times the factor of a linear stretch; that is what a factor
    means unless its type is `none`."""
    factor = (
        file.get(f"{kind}.rope.scaling.factor", file.get(f"{kind}.rope.scale_linear", 0.0)) or 1.0
    )
    if file.get(f"{kind}.rope.scaling.type", "linear") == "none":
        factor = 1.0
    if ROPE_DIVISORS in file.tensors:
        return tuple((file.tensor(ROPE_DIVISORS) * factor).tolist())
    return () if factor == 1 else (float(factor),) * (head_width // 2)


def _in_halves(part: np.ndarray, head_width: int) -> np.ndarray:
    """Returns the rows of each head of a kernel [outputs, inputs] or bias, whose rotary pairs
    llama.cpp keeps side by side."""
    pairs = part.reshape(-1, head_width // 2, 2, *part.shape[1:])
    return pairs.swapaxes(1, 2).reshape(part.shape)
