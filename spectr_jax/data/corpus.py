"""Sources of sentences: TFDS `lm1b`, or text files with one sentence per line."""

import codecs
import contextlib
import glob
import gzip
import hashlib
import lzma
import pathlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from spectr_jax.utils.errors import UserError, first_line
from spectr_jax.utils.files import digest, expanded

TFDS_PREFIX = "tfds:"
PACKED_PREFIX = "packed:"
READ_TOGETHER = 1_024


class Sentences(Protocol):
    """Random access to sentences, as Grain's random-access data sources."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


class TextSentences:
    """The lines of a UTF-8 buffer, each ended by a newline, without blank lines and carriage
    returns. Python strings would take three times the memory."""

    def __init__(self, lines: bytes):
        buffer = np.frombuffer(lines, np.uint8)
        ends = np.flatnonzero(buffer == ord("\n"))
        starts = np.append(0, ends[:-1] + 1)
        # Each slice contains its newline, which counts as blank too.
        filled = np.logical_or.reduceat(buffer > ord(" "), starts)
        self._lines, self._starts, ends = lines, starts[filled], ends[filled]
        self._ends = ends - (buffer[ends - 1] == ord("\r"))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> str:
        return self._lines[self._starts[index] : self._ends[index]].decode("utf-8")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def digest(self) -> str:
        """Returns a digest of the whole buffer. Hashing takes about as long as reading."""
        return digest(self._lines)

    def part(self, first: int, last: int) -> "TextSentences":
        """Returns sentences `first` to `last` - 1, with a copy of their text only."""
        return TextSentences(self._lines[self._starts[first] : self._ends[last - 1]] + b"\n")


class TfdsSentences:
    """A TFDS data source of `{"text": bytes}` examples in array_record files, read without
    TensorFlow.

    Raises `UserError` on reading a missing, truncated or corrupt file.
    """

    def __init__(self, spec: str, source: Any, files: Sequence[Any]):
        self._spec, self._source, self._files = spec, source, files

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> str:
        with self._explained(f"sentence {index}"):
            return self._source[index]["text"].decode("utf-8")

    def read(self, indices: range) -> list[str]:
        """Returns several sentences, which takes an eighth of the time of one at a time."""
        with self._explained(f"a sentence of {indices.start}..{indices.stop - 1}"):
            return [
                example["text"].decode("utf-8") for example in self._source.__getitems__(indices)
            ]

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """A context that turns errors of reading into `UserError`."""
        try:
            yield
        except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"{what} of {self._spec!r} cannot be read ({error}); restore the file, or remove "
                "the corpus and prepare it again"
            ) from error

    def digest(self) -> str:
        """Returns a digest of the files. Reading all sentences one by one would take minutes."""
        found = []
        for path in self._files:
            with self._explained(f"file {str(path)!r}"), path.open("rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest())
        return digest(" ".join(found).encode())

    def part(self, first: int, last: int) -> "TfdsPart":
        """Returns sentences `first` to `last` - 1."""
        return TfdsPart(self, range(first, last))


class TfdsPart:
    """Iterates over some sentences of a TFDS corpus, which are read when they are needed."""

    def __init__(self, sentences: TfdsSentences, indices: range):
        self._sentences, self._indices = sentences, indices

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self._indices), READ_TOGETHER):
            yield from self._sentences.read(self._indices[first : first + READ_TOGETHER])


def open_sentences(spec: str, tfds_dir: str | None = None) -> Sentences:
    """Returns the sentences of a corpus, in the order of the sorted file names, without blank
    lines.

    Args:
      spec: `tfds:DATASET:SPLIT` (for example `tfds:lm1b:train`), or a text file, a folder of
        them, or a glob. Files that end in .gz or .xz are unpacked. The folders of the unpacked
        LM1B release work.
      tfds_dir: where TFDS keeps its data sets; None for its default.

    Raises:
      UserError: the corpus is missing, empty or corrupt, or the TFDS data set is not prepared.
    """
    if spec.startswith(PACKED_PREFIX):
        raise UserError(
            f"{spec!r} is packed for training, and text is needed here; give the original text"
        )
    if spec.startswith(TFDS_PREFIX):
        sentences: Sentences = TfdsSentences(spec, *_tfds_source(spec, tfds_dir))
    else:
        texts = [read_bytes(path) for path in text_files(spec)]
        sentences = TextSentences(b"\n".join([*texts, b""]))
    if not len(sentences):
        raise UserError(f"the corpus {spec!r} is empty; give text with one sentence per line")
    return sentences


def part(sentences: Sentences, first: int, last: int) -> Iterable[str]:
    """Returns sentences `first` to `last` - 1, to be read once, in order. To send them to another
    process costs no more than their text; that of TFDS is read there."""
    if isinstance(sentences, TextSentences | TfdsSentences):
        return sentences.part(first, last)
    return [sentences[index] for index in range(first, last)]


def corpus_digest(sentences: Sentences) -> str:
    """Returns a digest of the number of sentences and of 256 evenly spaced ones."""
    picked = np.unique(np.linspace(0, len(sentences) - 1, 256).astype(int))
    lines = [str(len(sentences)), *(sentences[int(index)] for index in picked)]
    return digest("\n".join(lines).encode())[:12]


def content_digest(corpus: Any) -> str:
    """Returns a digest of `Sentences` that changes with any edit, in about the time of reading the
    files (4 GB of LM1B: some seconds), or of `PackedRows`, which relies on that in their index."""
    if hasattr(corpus, "digest"):
        return corpus.digest()[:16]
    return digest("\n".join(corpus[index] for index in range(len(corpus))).encode())[:16]


def sample_sentences(sentences: Sentences, count: int, seed: int) -> Iterator[str]:
    """Yields `count` sentences (or all) drawn without replacement, in corpus order."""
    picked = np.random.default_rng(seed).permutation(len(sentences))[:count]
    return (sentences[int(index)] for index in np.sort(picked))


def read_bytes(path: pathlib.Path) -> bytes:
    """Returns the UTF-8 text of a file without a byte-order mark, unpacking .gz and .xz. Raises
    `UserError` if it is corrupt."""
    openers: dict[str, Callable] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            text = file.read().removeprefix(codecs.BOM_UTF8)
        text.decode("utf-8")
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{str(path)!r} is corrupt ({error}); restore or remove it") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{str(path)!r} is not UTF-8 text ({error.reason} at byte {error.start}); convert it"
        ) from error
    except OSError as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error.strerror or error}); check the path"
        ) from error
    return text


def text_files(spec: str) -> list[pathlib.Path]:
    """Returns the sorted files of a path, a folder or a glob. Raises `UserError` if there are
    none."""
    path = expanded(spec)
    paths = path.iterdir() if path.is_dir() else map(pathlib.Path, glob.glob(str(path)))
    files = sorted(file for file in paths if file.is_file() and not file.name.startswith("."))
    if not files or not spec:  # "" would be the current folder.
        raise UserError(
            f"no text file matches {spec!r}; give a file, a folder, a glob or tfds:DATASET:SPLIT"
        )
    return files


def _tfds_source(spec: str, tfds_dir: str | None) -> tuple[Any, list[Any]]:
    """Returns the data source and the paths of its files."""
    name, _, split = spec.removeprefix(TFDS_PREFIX).partition(":")
    if not name or not split or ":" in split:
        raise UserError(f"corpus {spec!r}: must be tfds:DATASET:SPLIT, such as tfds:lm1b:train")
    # Only the preparation needs TensorFlow.
    preparation = "scripts/prepare_lm1b.sh"
    if name != "lm1b":
        preparation = f"tfds.builder({name!r}, file_format='array_record').download_and_prepare()"
    # Imported late: it takes seconds, and text corpora do not need it.
    import tensorflow_datasets as tfds

    missing_set = tfds.core.DatasetNotFoundError
    try:
        builder = tfds.builder(name, data_dir=tfds_dir, file_format="array_record")
        source = builder.as_data_source(split=split)
    except (missing_set, ValueError, KeyError, AssertionError, FileNotFoundError) as error:
        raise UserError(
            f"the TFDS corpus {spec!r} cannot be opened in {tfds_dir or 'the default folder'} "
            f"({first_line(error)}); prepare it: {preparation}"
        ) from error
    files = builder.info.splits[split].filepaths
    missing = [path for path in files if not path.exists()]
    if missing:
        raise UserError(
            f"{len(missing)} files of the TFDS corpus {spec!r} are missing, the first is "
            f"{str(missing[0])!r}; restore them, or remove {str(builder.data_path)!r} and prepare "
            f"it again: {preparation}"
        )
    if "text" not in builder.info.features:
        raise UserError(
            f"the TFDS corpus {spec!r} has no feature 'text', only "
            f"{', '.join(builder.info.features)}; give a data set of text"
        )
    return source, files
