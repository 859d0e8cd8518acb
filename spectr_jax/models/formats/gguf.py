"""GGUF files of the Llama family, with any quantisation that the library `gguf` can read."""

import math
import pathlib
from typing import Any

import gguf
import numpy as np
from jax.sharding import Mesh

from spectr_jax.models.formats.folder import check_fields, check_known, refused
from spectr_jax.models.formats.parts import fill, llama_arrays
from spectr_jax.models.formats.tensors import Unread
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import check_fetched

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "norm_attention": "attn_norm.weight",
    "norm_mlp": "ffn_norm.weight",
    "out": "attn_output.weight",
    **{name: f"attn_{name}.weight" for name in "qkv"},
    **{f"{name}_bias": f"attn_{name}.bias" for name in "qkv"},
    **{f"norm_{name}": f"attn_{name}_norm.weight" for name in "qk"},
    **{name: f"ffn_{name}.weight" for name in ("gate", "up", "down")},
}
"""llama.cpp's names of the parts of a model; `blk.LAYER.` precedes those of a layer."""
ROPE_DIVISORS = "rope_freqs.weight"
FIELDS = {
    "a positive integer": (
        *("context_length", "embedding_length", "block_count", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        "rope.dimension_count",
    ),
    "a positive number": ("rope.freq_base",),
    "a non-negative number": (
        *("rope.scaling.factor", "rope.scale_linear", "attention.layer_norm_rms_epsilon"),
    ),
}
"""Fields of the metadata of each kind (`folder.KINDS`)."""


class _Reader(gguf.GGUFReader):
    """A reader that opens a file with a large vocabulary six times as fast.

    Its views are plain arrays, not memory maps, and it reads a list in one pass; the library makes
    two views of each of 100,000 tokens and merges.
    """

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list, list, list]:
        """Returns the bytes of a value, its parts, the indices of the parts with data, and types."""
        array = gguf.GGUFValueType.ARRAY
        if raw_type != array or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        (kind,), (count,) = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item, start = gguf.GGUFValueType(kind), orig_offs + 12
        if item == array:
            return super()._get_field_parts(orig_offs, raw_type)
        if item == gguf.GGUFValueType.STRING:
            values: list[Any] = _strings(memoryview(self._data.data), start, int(count))
            size = sum(value.nbytes for value in values) + 8 * len(values)
        else:
            values = [self._get(start, self.gguf_scalar_to_np[item], count)]
            size = values[0].nbytes
        return 12 + size, values, list(range(len(values))), [array, item]


def _strings(data: memoryview, start: int, count: int) -> list[memoryview]:
    """Returns `count` strings, each after its length in eight bytes; raises ValueError if `data`
    ends before them."""
    found = []
    for _ in range(count):
        end = start + 8 + int.from_bytes(data[start : start + 8], "little")
        if len(data) < max(end, start + 8):
            raise ValueError("its list of strings is cut")
        found.append(data[start + 8 : end])
        start = end
    return found


class GGUF:
    """An open GGUF file: its metadata, and its tensors, each read on access."""

    def __init__(self, path: pathlib.Path):
        """Opens `path`; raises `UserError` unless it is a complete GGUF file."""
        self.path = path
        try:
            check_fetched(path)
            with path.open("rb") as file:
                magic, version = file.read(4), file.read(4)
            # Numbers in a list of a big-endian file would be read wrong.
            if magic == b"GGUF" and version[:2] == b"\0\0":
                raise UserError(
                    f"{str(path)!r} is a big-endian GGUF file; convert it with: python -m "
                    "gguf.scripts.gguf_convert_endian FILE little"
                )
            reader = _Reader(path)
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._fields = reader.fields
        except UserError:
            raise
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise UserError(
                f"{str(path)!r} is not a GGUF file that can be read ({error}); fetch it again"
            ) from error

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a value of the metadata; raises `UserError` if it is damaged."""
        field = self._fields.get(name)
        try:
            return default if field is None else field.contents()
        except (ValueError, IndexError) as error:
            raise UserError(
                f"{str(self.path)!r} has a damaged {name!r} in its metadata ({error}); fetch it again"
            ) from error

    def need(self, name: str) -> Any:
        """Returns a value of the metadata; raises `UserError` if there is none."""
        if name not in self._fields:
            raise UserError(f"{str(self.path)!r} lacks {name!r} in its metadata; fetch it again")
        return self.get(name)

    def tensor(self, name: str) -> Unread:
        """Returns a tensor in float32. Its rows raise `UserError` if it cannot be dequantised.

        Raises:
          KeyError: there is none.
        """
        found = self.tensors[name]
        kind, shape = found.tensor_type, tuple(map(int, reversed(found.shape)))
        stored = np.atleast_2d(found.data)  # A vector is one row of blocks, and is read whole.

        def rows(start: int, stop: int) -> np.ndarray:
            first, last = (start, stop) if len(shape) > 1 else (0, 1)
            row = math.prod(stored.shape[1:])
            offset = found.data_offset + first * row * stored.itemsize
            try:
                # This bypasses the reader's memory map, whose pages would stay in memory.
                read = np.fromfile(self.path, stored.dtype, (last - first) * row, offset=offset)
                # The library dequantizes 16 rows at a time, which is quicker for long rows.
                of_each = math.gcd((last - first) * math.prod(stored.shape[1:-1]), 16)
                values = gguf.dequantize(read.reshape(-1, of_each * stored.shape[-1]), kind)
                values = np.asarray(values, np.float32).reshape(last - first, *shape[1:] or (-1,))
            except (NotImplementedError, ValueError) as error:
                raise UserError(
                    f"{str(self.path)!r} has {name} in {kind.name}, which cannot be read ({error}); "
                    "give another file"
                ) from error
            return values if len(shape) > 1 else values[0, start:stop]

        return Unread(shape, rows)


def load_gguf(file: GGUF, dtype: str = "float32", mesh: Mesh | None = None) -> Llama:
    """Reads a model of the Llama family for decoding.

    Args:
      file: the open file.
      dtype: "float32", "bfloat16" or "int8", whatever the file holds.
      mesh: as in `fill`.

    Raises:
      UserError: the file lacks a part, or its model is not supported; or as `fill`.
    """
    config = gguf_config(file)
    interleaved = file.need("general.architecture") == "llama"
    unread = set(file.tensors) - {ROPE_DIVISORS}

    def tensor(name: str) -> Unread:
        array = file.tensor(name)
        unread.discard(name)
        rotary = interleaved and name.split(".")[-2] in ("attn_q", "attn_k")
        # `fill` reads whole heads, and refuses tensors of other shapes.
        return array.then(lambda rows: _in_halves(rows, config.head_width)) if rotary else array

    arrays = llama_arrays(config, tensor, NAMES, "blk.{}.", str(file.path))
    model = fill(config, arrays, dtype, source=str(file.path), mesh=mesh)
    if unread:  # Nothing else in the file says that a model has such parts.
        raise UserError(f"{str(file.path)!r} has an unsupported part {min(unread)!r}; give another")
    return model


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
    context = need("context_length")
    heads, width = need("attention.head_count"), need("embedding_length")
    head_width = get("attention.key_length", width // heads)
    known = {"expert_count": (0,), "rope.scaling.type": ("none", "linear")}
    check_known(path, file, known | {"rope.dimension_count": (head_width,)}, prefix=f"{arch}.")
    window = get("attention.sliding_window", context)
    if type(window) is not int or window < context:
        wanted = f"at least the context of {context}"
        raise refused(path, f"{arch}.attention.sliding_window", window, wanted)
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
        rope_divisors=_divisors(file, arch, head_width),
        norm_epsilon=need("attention.layer_norm_rms_epsilon"),
        tied=NAMES["head"] not in file.tensors,
        qkv_bias=f"blk.0.{NAMES['q_bias']}" in file.tensors,
        qk_norm=f"blk.0.{NAMES['norm_q']}" in file.tensors,
    )


def _divisors(file: GGUF, arch: str, head_width: int) -> tuple[float, ...]:
    """Returns the divisors of the rotary frequencies; empty if all are 1.

    They are the file's tensor of divisors, if any, times its linear factor. As in llama.cpp, the
    factor counts unless the type of scaling is `none`.
    """
    factor = file.get(f"{arch}.rope.scaling.factor", file.get(f"{arch}.rope.scale_linear")) or 1.0
    if file.get(f"{arch}.rope.scaling.type") == "none":
        factor = 1.0
    if ROPE_DIVISORS in file.tensors:
        return tuple((file.tensor(ROPE_DIVISORS)[:] * factor).tolist())
    return () if factor == 1 else (float(factor),) * (head_width // 2)


def _in_halves(part: np.ndarray, head_width: int) -> np.ndarray:
    """Returns a kernel [outputs, inputs] or bias with the channels of a rotary pair D / 2 apart.

    llama.cpp stores them next to each other.
    """
    pairs = part.reshape(-1, head_width // 2, 2, *part.shape[1:])
    return pairs.swapaxes(1, 2).reshape(part.shape)
