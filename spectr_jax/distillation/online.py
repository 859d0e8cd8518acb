"""Text that a teacher labels while its student learns, so that no labels are stored.

A source is a corpus, which is encoded and packed while it is read, or a folder of rows written by
`spectr_jax.label`, such as chats, of which only the tokens are read. Each source has a fixed share
of the rows of a batch.
"""

import functools
import math
import pathlib
import re
from typing import Any

import grain
import ml_collections
import numpy as np

from spectr_jax.data import batches
from spectr_jax.data.corpus import Sentences, open_sentences
from spectr_jax.data.packed import digest_of
from spectr_jax.data.shuffled import ShuffledRows
from spectr_jax.distillation import labels
from spectr_jax.distillation import teacher as teaching
from spectr_jax.distillation.labels import LabelledRows
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.base import features_shown
from spectr_jax.models.frozen import Frozen, digest, freeze
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded

COUNTED_ROWS = 2_048
"""Number of rows in which tokens are counted."""

Source = Sentences | LabelledRows


class OnlineRows:
    """Packed text from several sources and the teacher that labels it.

    Attributes:
      model: the teacher's model.
      teacher, vocabulary, vocab_size, context, features, length, counts: as in `LabelledRows`.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, teacher: Trained, counts: tuple[int, ...] = ()
    ):
        self.model: Frozen = freeze(teacher)
        self.teacher = labels.Teacher(config.teacher, config.teacher_dtype, "")
        self.vocabulary, self.vocab_size = teacher.tokenizer.vocabulary, teacher.model.vocab_size
        self.context, self.features = teacher.model.context, features_shown(teacher.model)
        self.length = config.data.length
        self._tokenizer, self._data = teacher.tokenizer, config.data
        self._row_type = labels.row_type(self.vocab_size, self.length, labelled=False)
        names = self._names = [name.strip() for name in config.data.train.split(",")]
        self._sources = [self._open(name, counts[i : i + 1]) for i, name in enumerate(names)]
        self._rows_of_each = _rows_of_each(config, len(names))
        self.counts = tuple(len(source) for source in self._sources)
        if counts and len(counts) != len(names):
            raise labels.other_sources(len(names), len(counts))
        for name, there, before in zip(names, self.counts, counts or self.counts, strict=True):
            if there != before:
                raise UserError(
                    f"data.train={name!r}: has {there} sentences, and had {before} before; restore "
                    "the corpus"
                )

    def digests(self) -> dict[str, Any]:
        """Returns digests of the sources and of the teacher, by the fields that name them."""
        return {
            "data.train": [digest_of(source) for source in self._sources],
            "teacher": digest(self.model),
        }

    def streams(self, streams: int) -> int:
        """Returns the largest number of streams, at most `streams`, that divides the rows of each
        source in a batch."""
        return math.gcd(streams, *self._rows_of_each)

    def batches(
        self, seed: int, streams: int, process: int = 0, processes: int = 1
    ) -> grain.IterDataset:
        """Returns an endless, shuffled pipeline of batches without labels; see
        `data.batches.training_batches`.

        Raises:
          UserError: a source has fewer sentences, or rows, than there are streams, or a stream has
            no sentence to learn from.
        """
        if min(self.counts) < streams:
            raise UserError(
                f"data.streams={streams}: must be at most the {min(self.counts)} rows of the "
                "smallest source; lower it, or give more text"
            )
        for name, source in zip(self._names, self._sources, strict=True):
            if not isinstance(source, LabelledRows):
                self._check_streams(name, source, streams)

        def stream_of(source: Source, count: int, stream: int) -> grain.IterDataset:
            if isinstance(source, LabelledRows):
                rows = ShuffledRows(
                    source, count=count, seed=seed + stream, stream=stream, streams=streams
                )
                return rows.map(self._without_labels)
            texts = batches.shuffled(source, seed, stream, streams).map(self._encoded)
            return teaching.packed(texts, self._row_type).batch(count)

        sources = [
            functools.partial(stream_of, source, rows // streams)
            for source, rows in zip(self._sources, self._rows_of_each, strict=True)
        ]
        return batches.mixed_batches(sources, labels.batch_of, streams, process, processes)

    def heldout(self) -> dict[str, np.ndarray]:
        """Returns the first rows of each held-out source, by name."""
        heldout, count = {}, self._data.heldout_rows
        for name in self._data.heldout:
            source = self._open(name, ())
            if isinstance(source, LabelledRows):
                rows = self._without_labels(source.first(count))
            else:
                # Almost no text has fewer than 8 tokens per sentence.
                enough = min(len(source), -(-count * self.length // 8))
                texts = teaching.read_texts(source, self._tokenizer)(0, enough)
                rows = teaching.pack_rows(texts, self._row_type)[:count]
                if not len(rows):
                    raise UserError(
                        f"data.heldout={name!r}: its first {enough} sentences have one token each; "
                        "give longer ones"
                    )
            heldout[short_name(name)] = rows
        return heldout

    def frequent_tokens(self, count: int, seed: int) -> np.ndarray:
        """Returns the `count` most frequent tokens of the text, int32 in ascending order."""
        counted, rows = np.zeros(self.vocab_size, np.int64), 0
        data = iter(self.batches(seed, self.streams(self._data.streams)))
        while rows < COUNTED_ROWS:
            batch = next(data)
            real = batch["inputs"][batch["segments"] > 0]
            counted += np.bincount(real, minlength=self.vocab_size)
            rows += len(batch["inputs"])
        data.close()
        return np.sort(np.argsort(-counted, kind="stable")[:count]).astype(np.int32)

    def _open(self, name: str, counts: tuple[int, ...]) -> Source:
        if not (expanded(name) / labels.INDEX).is_file():
            return open_sentences(name, self._data.tfds_dir or None)
        rows = labels.open_labels(name, counts)
        for field, wanted in (("vocabulary", self.vocabulary), ("length", self.length)):
            if getattr(rows, field) != wanted:
                raise UserError(
                    f"{name!r} has rows of {field}={getattr(rows, field)!r}, and this run needs "
                    f"{wanted!r}; label again with the teacher and the --length of this run, or "
                    "set data.length"
                )
        return rows

    def _check_streams(self, name: str, source: Sentences, streams: int) -> None:
        """Raises `UserError` if a stream has only sentences of one token, which are dropped."""
        for stream in range(streams):
            indices = range(stream, len(source), streams)
            if all(len(self._tokenizer.prompt(source[index])) < 2 for index in indices):
                raise UserError(
                    f"data.train={name!r}: stream {stream} of data.streams={streams} has only "
                    "sentences of one token; give longer ones, or lower data.streams"
                )

    def _encoded(self, sentence: str) -> teaching.Text:
        return teaching.Text(self._tokenizer.prompt(sentence))

    def _without_labels(self, rows: np.ndarray) -> np.ndarray:
        bare = np.zeros(len(rows), self._row_type)
        bare["tokens"], bare["segments"] = rows["tokens"], rows["segments"]
        older = "drafted" not in (rows.dtype.names or ())
        bare["drafted"] = rows["segments"] > 0 if older else rows["drafted"]
        return bare


def short_name(spec: str) -> str:
    """Returns the name of a source in metrics: the last part of its path as an identifier."""
    return re.sub(r"\W+", "_", pathlib.PurePath(spec).name.partition(".")[0]).strip("_")


def _rows_of_each(config: ml_collections.ConfigDict, sources: int) -> list[int]:
    """Returns the number of rows of a batch from each source, by `data.shares`."""
    shares = tuple(config.data.shares)
    shares = shares * sources if len(shares) == 1 else shares
    if len(shares) != sources or any(config.batch_size * share % sum(shares) for share in shares):
        raise UserError(
            f"data.shares={tuple(config.data.shares)}: must divide batch_size={config.batch_size} among the {sources} "
            "sources of data.train; give one positive integer each, whose sum divides the batch "
            "size"
        )
    return [config.batch_size * share // sum(shares) for share in shares]
