"""Opens a corpus to train on: text, or the shards that `packing.pack` wrote."""

import json

from spectr_jax.data.corpus import PACKED_PREFIX, Sentences, content_digest, open_sentences
from spectr_jax.data.packing import DAMAGE, FORMAT, INDEX, read_shards
from spectr_jax.data.shuffled import PackedRows
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded, parse_json, read_text


def open_corpus(spec: str, tfds_dir: str | None = None) -> Sentences | PackedRows:
    """Returns a training corpus: `packed:FOLDER` written by `packing.pack`, or what
    `open_sentences` takes.

    Raises:
      UserError: it is missing, empty or damaged.
    """
    if not spec.startswith(PACKED_PREFIX):
        return open_sentences(spec, tfds_dir)
    folder = expanded(spec.removeprefix(PACKED_PREFIX))
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


def digest_of(corpus: Sentences | PackedRows) -> str:
    """Returns a digest of the content of a training corpus, wherever it lies. That of packed rows
    relies on their index, which has a digest of the text."""
    return corpus.digest() if isinstance(corpus, PackedRows) else content_digest(corpus)
