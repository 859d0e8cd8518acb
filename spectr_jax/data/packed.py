"""A corpus to train on: text, or packed rows, which `packing.pack` wrote."""

import json
import pathlib

import numpy as np

from spectr_jax.data.corpus import PACKED_PREFIX, Sentences, open_sentences
from spectr_jax.data.packing import DAMAGE, FORMAT, INDEX, read_shards
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest, expanded, parse_json, read_text


class PackedRows:
    """Random access to rows of shards that are memory-mapped or in memory: tokens [length], or
    structured ones (`distillation.labels`).

    `tokenizer_digest` identifies the tokenizer that made them (of labels, its vocabulary), and
    `identity` what they were made from.
    """

    def __init__(self, shards: list[np.ndarray], tokenizer_digest: str, identity: str = ""):
        self._shards, self._identity = shards, identity
        self._ends = np.cumsum([len(shard) for shard in shards])
        self.tokenizer_digest = tokenizer_digest

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self._shards[0].shape[1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> np.ndarray:
        return self.take(np.array([index]))[0]

    def digest(self) -> str:
        """Returns a digest of what the rows were made from, of their number, and of 256 evenly
        spaced rows."""
        picked = np.unique(np.linspace(0, len(self) - 1, 256).astype(int))
        about = f"{self._identity} {self.tokenizer_digest} {len(self)} "
        return digest(about.encode() + self.take(picked).tobytes())[:16]

    def first(self, count: int) -> np.ndarray:
        """Returns the first `count` rows, or all if there are fewer."""
        return self.take(np.arange(min(count, len(self))))

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Returns the rows at `indices`, [count, ...]."""
        shards = np.searchsorted(self._ends, indices, side="right")
        from_end = indices - self._ends[shards]  # Negative: counted from the end of the shard.
        places = zip(shards.tolist(), from_end.tolist(), strict=True)
        return np.stack([self._shards[shard][index] for shard, index in places])


def open_corpus(spec: str, tfds_dir: str | None = None) -> Sentences | PackedRows:
    """Returns a training corpus: `packed:FOLDER` written by `packing.pack`, or what
    `open_sentences` takes.

    Raises:
      UserError: it is missing, empty or damaged.
    """
    if spec.startswith(PACKED_PREFIX):
        return open_packed(expanded(spec.removeprefix(PACKED_PREFIX)))
    return open_sentences(spec, tfds_dir)


def open_packed(folder: pathlib.Path) -> PackedRows:
    """Returns the rows that `packing.pack` wrote. Raises `UserError` if they are missing or
    damaged."""
    try:
        index = parse_json(read_text(folder / INDEX))
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r}")
        return PackedRows(read_shards(folder, index), index["tokenizer_sha256"], json.dumps(index))
    except DAMAGE as error:
        raise UserError(
            f"{str(folder)!r} is not a packed corpus that can be read ({error}); pack it again: "
            "python -m spectr_jax.pack"
        ) from error
