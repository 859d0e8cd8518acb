"""A corpus that was tokenised and packed once: rows of uint16 targets in shards, read many times
faster than text.

A row holds the targets of several sentences one after the other, each ended by EOS, then padding; a
cut sentence fills a row of its own. Where each sentence begins follows from the tokens, so nothing
else is stored.
"""

import io
import json
import lzma
import pathlib

import numpy as np

from spectr_jax.data.batches import evaluation_batches
from spectr_jax.data.corpus import PACKED_PREFIX, Sentences, open_sentences
from spectr_jax.data.tokenizer import PAD, Tokenizer
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest, expanded, write_json, write_whole

FORMAT = "spectr_jax/packed/1"
ROWS_A_SHARD = 2**15
INDEX = "packed.json"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, lzma.LZMAError)


class PackedRows:
    """Random access to rows, uint16 [length], of shards that are memory-mapped or held."""

    def __init__(self, shards: list[np.ndarray], tokenizer_digest: str):
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards])
        self.tokenizer_digest = tokenizer_digest

    @property
    def length(self) -> int:
        """Tokens a row."""
        return self._shards[0].shape[1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        return self._shards[shard][
            index - self._ends[shard]
        ]  # From behind: index - end is negative.

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Returns the rows at `indices`, uint16 [count, length]."""
        shards = np.searchsorted(self._ends, indices, side="right")
        behind = indices - self._ends[shards]
        return np.stack(
            [
                self._shards[shard][index]
                for shard, index in zip(shards.tolist(), behind.tolist(), strict=True)
            ]
        )


def pack(
    sentences: Sentences,
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    length: int,
    compress: bool = False,
) -> dict:
    """Packs all sentences, in their order, into `folder`: shards, tokenizer.model and, once all is
    there, an index.

    Args:
      sentences: the corpus.
      tokenizer: of at most 65,536 pieces.
      folder: made if need be.
      length: tokens a row; longer sentences are cut.
      compress: with xz, for copying to another machine; opening takes a few seconds longer.

    Returns:
      The index: format, length, digest of the tokenizer, rows of each shard, and how many sentences
      and tokens there are.

    Raises:
      UserError: the vocabulary is too large for uint16.
    """
    if tokenizer.vocab_size > 2**16:
        raise UserError(
            f"a vocabulary of {tokenizer.vocab_size} pieces does not fit 16 bits; train one of at "
            "most 65536"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "tokenizer.model", tokenizer.proto)
    shards: dict[str, int] = {}
    tokens = 0
    for batch in evaluation_batches(sentences, tokenizer, batch=ROWS_A_SHARD, length=length):
        rows = batch["targets"].astype(np.uint16)
        file = io.BytesIO()
        np.save(file, rows)
        name = f"train-{len(shards):05d}.npy" + ".xz" * compress
        write_whole(folder / name, lzma.compress(file.getvalue()) if compress else file.getvalue())
        shards[name] = len(rows)
        tokens += int(np.sum(rows != PAD))
    index = {
        "format": FORMAT,
        "length": length,
        "sentences": len(sentences),
        "tokens": tokens,
        "tokenizer_sha256": digest(tokenizer.proto),
        "rows": shards,
    }
    write_json(folder / INDEX, index)
    return index


def open_corpus(spec: str, tfds_dir: str | None = None) -> Sentences | PackedRows:
    """Opens what a model can be trained on: `packed:FOLDER` for what `pack` wrote, or what
    `open_sentences` takes.

    Raises:
      UserError: nothing there, nothing in it, or damaged.
    """
    if not spec.startswith(PACKED_PREFIX):
        return open_sentences(spec, tfds_dir)
    folder = expanded(spec.removeprefix(PACKED_PREFIX))
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r}")
        shards = [
            _read(folder / name, (rows, index["length"])) for name, rows in index["rows"].items()
        ]
        tokenizer_digest = index["tokenizer_sha256"]
    except _DAMAGE as error:
        raise UserError(
            f"{str(folder)!r} is not a packed corpus that can be read ({error}); pack it again: "
            "python -m spectr_jax.pack"
        ) from error
    return PackedRows(shards, tokenizer_digest)


def _read(path: pathlib.Path, shape: tuple[int, int]) -> np.ndarray:
    rows = (
        np.load(io.BytesIO(lzma.decompress(path.read_bytes())))
        if path.suffix == ".xz"
        else np.load(path, mmap_mode="r")
    )
    if rows.shape != shape or rows.dtype != np.uint16:
        raise ValueError(f"{path.name} has {rows.dtype} {rows.shape}, not uint16 {shape}")
    return np.asarray(
        rows
    )  # Still mapped, without what NumPy's memmap does in Python for each row.
