"""A corpus tokenized and packed once: shards of uint16 rows, read many times faster than text.

A row holds the targets of several sentences, each ended by EOS, then padding. A cut sentence fills
a row of its own. The tokens themselves show where each sentence begins.
"""

import io
import json
import lzma
import pathlib

import numpy as np

from spectr_jax.data.batches import evaluation_batches
from spectr_jax.data.corpus import PACKED_PREFIX, Sentences, open_sentences
from spectr_jax.data.shuffled import PackedRows
from spectr_jax.data.tokenizer import PAD, Tokenizer
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest, expanded, write_json, write_whole

FORMAT = "spectr_jax/packed/1"
ROWS_A_SHARD = 2**15
INDEX = "packed.json"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, EOFError, lzma.LZMAError)


def pack(
    sentences: Sentences,
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    length: int,
    compress: bool = False,
) -> dict:
    """Packs all sentences in order into `folder`: shards, tokenizer.model and finally an index,
    which is returned: format, length, digest of the tokenizer, rows of each shard, and the numbers
    of sentences and tokens.

    Sentences are cut to `length` tokens. With `compress` shards are compressed with xz, for
    copying; opening them then takes seconds longer.

    Raises:
      UserError: the vocabulary is too large for uint16.
    """
    if tokenizer.vocab_size > 2**16:
        raise UserError(
            f"{tokenizer.vocab_size} pieces do not fit 16 bits; train a vocabulary of at most 65536"
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
    """Returns a training corpus: `packed:FOLDER` written by `pack`, or what `open_sentences` takes.

    Raises:
      UserError: it is missing, empty or damaged.
    """
    if not spec.startswith(PACKED_PREFIX):
        return open_sentences(spec, tfds_dir)
    folder = expanded(spec.removeprefix(PACKED_PREFIX))
    try:
        index = json.loads((folder / INDEX).read_text())
        if index["format"] != FORMAT:
            raise ValueError(f"format {index['format']!r}")
        length, counts = index["length"], index["rows"].items()
        shards = [_read(folder / name, (rows, length)) for name, rows in counts]
        return PackedRows(shards, index["tokenizer_sha256"])
    except _DAMAGE as error:
        raise UserError(
            f"{str(folder)!r} is not a packed corpus that can be read ({error}); pack it again: "
            "python -m spectr_jax.pack"
        ) from error


def _read(path: pathlib.Path, shape: tuple[int, int]) -> np.ndarray:
    compressed = path.suffix == ".xz"
    file = io.BytesIO(lzma.decompress(path.read_bytes())) if compressed else path
    rows = np.load(file, mmap_mode=None if compressed else "r")
    if rows.shape != shape or rows.dtype != np.uint16:
        raise ValueError(f"{path.name} has {rows.dtype} {rows.shape}, not uint16 {shape}")
    # Still memory-mapped, without the overhead of NumPy's memmap for each row.
    return np.asarray(rows)
