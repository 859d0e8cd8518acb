"""Sources of sentences: TFDS `lm1b`, or text files with one sentence per line."""

import glob
import gzip
import lzma
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest, expanded

TFDS_PREFIX = "tfds:"
PACKED_PREFIX = "packed:"


class Sentences(Protocol):
    """Random access to sentences, as Grain's random-access data sources."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> str: ...


class TextSentences:
    """The lines of text files in one UTF-8 buffer, because Python strings would take three times
    the memory.

    Blank lines and carriage returns are dropped.
    """

    def __init__(self, lines: bytes):
        buffer = np.frombuffer(lines, np.uint8)
        ends = np.flatnonzero(buffer == ord("\n"))
        if len(buffer) and (len(ends) == 0 or ends[-1] != len(buffer) - 1):
            ends = np.append(ends, len(buffer))
        starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64) if len(ends) else ends
        starts, ends = starts[ends > starts], ends[ends > starts]
        if len(starts):
            filled = np.logical_or.reduceat(
                buffer > ord(" "), starts
            )  # What lies between the lines is below too.
            starts, ends = starts[filled], ends[filled]
        self._lines, self._starts, self._ends = (
            lines,
            starts,
            ends - (buffer[ends - 1] == ord("\r")),
        )

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int, /) -> str:
        return self._lines[self._starts[index] : self._ends[index]].decode("utf-8")


class TfdsSentences:
    """A TFDS data source of `{"text": bytes}` examples in array_record files, read without
    TensorFlow.

    Raises `UserError` on reading a missing, truncated or corrupt file.
    """

    def __init__(self, spec: str, source: Sequence[dict]):
        self._spec, self._source = spec, source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> str:
        try:
            return self._source[index]["text"].decode("utf-8")
        except (AttributeError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"sentence {index} of {self._spec!r} cannot be read ({error}); restore the file, "
                "or remove the corpus and "
                "prepare it again"
            ) from error


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
            f"{spec!r} is packed for training, and text is needed here; give the text that it was "
            "made from"
        )
    if spec.startswith(TFDS_PREFIX):
        sentences: Sentences = TfdsSentences(spec, _tfds_source(spec, tfds_dir))
    else:
        sentences = TextSentences(
            b"".join(_with_newline(read_text(path)) for path in text_files(spec))
        )
    if not len(sentences):
        raise UserError(f"the corpus {spec!r} is empty; give text with one sentence a line")
    return sentences


def corpus_digest(sentences: Sentences) -> str:
    """Returns a digest of the number of sentences and of 256 evenly spread ones."""
    picked = np.unique(np.linspace(0, len(sentences) - 1, 256).astype(int))
    return digest(
        "\n".join([str(len(sentences)), *(sentences[int(index)] for index in picked)]).encode()
    )[:12]


def sample_sentences(sentences: Sentences, count: int, seed: int) -> Iterator[str]:
    """Yields `count` sentences (or all) drawn without replacement, in corpus order."""
    picked = np.random.default_rng(seed).permutation(len(sentences))[:count]
    return (sentences[int(index)] for index in np.sort(picked))


def read_text(path: pathlib.Path) -> bytes:
    """Returns the UTF-8 text of a file, unpacking .gz and .xz. Raises `UserError` if it is
    corrupt."""
    openers: dict[str, Callable] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        with openers.get(path.suffix, open)(path, "rb") as file:
            text = file.read()
        text.decode("utf-8")
    except (lzma.LZMAError, gzip.BadGzipFile, EOFError) as error:
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


def _with_newline(text: bytes) -> bytes:
    return text if text.endswith(b"\n") or not text else text + b"\n"


def text_files(spec: str) -> list[pathlib.Path]:
    path = expanded(spec)
    found = path.iterdir() if path.is_dir() else map(pathlib.Path, glob.glob(str(path)))
    files = sorted(file for file in found if file.is_file() and not file.name.startswith("."))
    if not files or not spec:  # "" would be the current folder.
        raise UserError(
            f"no text file matches {spec!r}; give a file, a folder, a glob or tfds:DATASET:SPLIT"
        )
    return files


def _tfds_source(spec: str, tfds_dir: str | None) -> Sequence[dict]:
    parts = spec.removeprefix(TFDS_PREFIX).split(":")
    if len(parts) != 2 or not all(parts):
        raise UserError(
            f"corpus {spec!r} is not of the form tfds:DATASET:SPLIT, such as tfds:lm1b:train"
        )
    name, split = parts
    # Imported late: it takes seconds, and text corpora do not need it.
    import tensorflow_datasets as tfds

    try:
        builder = tfds.builder(name, data_dir=tfds_dir, file_format="array_record")
        source = builder.as_data_source(split=split)
    except (
        tfds.core.DatasetNotFoundError,
        ValueError,
        KeyError,
        AssertionError,
        FileNotFoundError,
    ) as error:
        first_line = (
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        )
        raise UserError(
            f"the TFDS corpus {spec!r} cannot be opened in {tfds_dir or 'the default folder'} "
            f"({first_line}); prepare it: "
            f"{_preparation(name)}"
        ) from error
    missing = [path for path in builder.info.splits[split].filepaths if not path.exists()]
    if missing:
        raise UserError(
            f"{len(missing)} files of the TFDS corpus {spec!r} are missing, the first is "
            f"{str(missing[0])!r}; restore them, "
            f"or remove {str(builder.data_path)!r} and prepare it again: {_preparation(name)}"
        )
    return source


def _preparation(name: str) -> str:
    """Returns the command that prepares a TFDS data set. Only this step needs TensorFlow."""
    if name == "lm1b":
        return "scripts/prepare_lm1b.sh"
    return f"tfds.builder({name!r}, file_format='array_record').download_and_prepare()"
