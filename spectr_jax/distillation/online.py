"""Text that a teacher labels while its student learns, so that no labels are stored.

A source is a corpus, which is encoded and packed while it is read, or a folder of rows written by
`spectr_jax.label`, such as chats, of which only the tokens are read. Each source has a fixed share
of the rows of a batch.
"""

import functools
import pathlib
import re
from typing import Any

import grain
import ml_collections
import numpy as np

from spectr_jax.data import batches
from spectr_jax.data.corpus import Sentences, content_digest, open_sentences
from spectr_jax.data.packed import ShuffledRows
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
      frozen: the teacher's model.
      teacher_name, vocabulary, vocab_size, context, features, length, counts: as in `LabelledRows`.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, teacher: Trained, counts: tuple[int, ...] = ()
    ):
        deepest = max(config.model.feature_layers, default=0)
        if deepest > teacher.model.layers:
            raise UserError(
                f"model.feature_layers={tuple(config.model.feature_layers)}: teacher="
                f"{config.teacher!r} has {teacher.model.layers} layers; lower them"
            )
        self.frozen: Frozen = freeze(teacher)
        self.teacher_name, self.vocab_size = config.teacher, teacher.model.vocab_size
        self.vocabulary = teacher.tokenizer.vocabulary
        self.context, self.features = teacher.model.context, features_shown(teacher.model)
        self.length = config.data.length
        self._tokenizer, self._tfds_dir = teacher.tokenizer, config.data.tfds_dir or None
        self._row_type = labels.row_type(self.vocab_size, self.length, labelled=False)
        names = self._names = [name.strip() for name in config.data.train.split(",")]
        self._sources = [self._open(name, counts[i : i + 1]) for i, name in enumerate(names)]
        self.counts = tuple(len(source) for source in self._sources)
        if counts and len(counts) != len(names):
            raise labels.other_sources(len(names), len(counts))
        for name, there, before in zip(names, self.counts, counts or self.counts, strict=True):
            if there != before:
                raise UserError(
                    f"data.train={name!r}: has {there} sentences, and had {before} before; restore "
                    "the corpus"
                )

    def sources(self, config: ml_collections.ConfigDict) -> list[tuple[int, int]]:
        """Returns for each source its number of sentences or rows, and how many rows a batch has of
        it by `data.shares`."""
        shares = tuple(config.data.shares)
        shares = shares * len(self.counts) if len(shares) == 1 else shares
        rows, remainders = zip(
            *(divmod(config.batch_size * share, sum(shares)) for share in shares), strict=True
        )
        if len(shares) != len(self.counts) or any(remainders):
            raise UserError(
                f"data.shares={tuple(config.data.shares)}: must divide batch_size="
                f"{config.batch_size} among the {len(self.counts)} sources of data.train; give one "
                "positive integer each, whose sum divides the batch size"
            )
        return list(zip(self.counts, rows, strict=True))

    def digests(self) -> dict[str, Any]:
        """Returns digests of the sources and of the teacher, by the fields that name them."""
        return {
            "data.train": [content_digest(source) for source in self._sources],
            "teacher": digest(self.frozen),
        }

    def batches(
        self, config: ml_collections.ConfigDict, streams: int, mine: slice = slice(None)
    ) -> grain.IterDataset:
        """Returns an endless, shuffled pipeline of batches without labels; see
        `data.batches.training_batches`.

        Raises:
          UserError: a stream has no sentence to learn from.
        """
        for name, source in zip(self._names, self._sources, strict=True):
            if not isinstance(source, LabelledRows):
                self._check_streams(name, source, streams)

        def rows_of_stream(source: Source, count: int, stream: int) -> grain.IterDataset:
            if isinstance(source, LabelledRows):
                rows = ShuffledRows(source, count, config.seed, streams, stream)
                return rows.map(self._without_labels)
            sentences = batches.shuffled(source, config.seed, stream, streams)
            texts = sentences.map(lambda sentence: teaching.Text(self._tokenizer.prompt(sentence)))
            return teaching.rows_of_texts(texts, self._row_type).batch(count)

        rows_of_streams = [
            functools.partial(rows_of_stream, source, rows // streams)
            for source, (_, rows) in zip(self._sources, self.sources(config), strict=True)
        ]
        return batches.mixed_batches(rows_of_streams, labels.batch_of, streams, mine)

    def heldout(self, config: ml_collections.ConfigDict) -> dict[str, np.ndarray]:
        """Returns the first rows of each held-out source, by name."""
        heldout, count = {}, config.data.heldout_rows
        for name in config.data.heldout:
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

    def tokens_by_count(
        self, count: int, config: ml_collections.ConfigDict, streams: int
    ) -> np.ndarray:
        """Returns the `count` most frequent tokens of the text, int32 in ascending order."""
        counted, rows = np.zeros(self.vocab_size, np.int64), 0
        data = iter(self.batches(config, streams))
        while rows < COUNTED_ROWS:
            batch = next(data)
            real = batch["inputs"][batch["segments"] > 0]
            counted += np.bincount(real, minlength=self.vocab_size)
            rows += len(batch["inputs"])
        data.close()
        return np.sort(np.argsort(-counted, kind="stable")[:count]).astype(np.int32)

    def _open(self, name: str, counts: tuple[int, ...]) -> Source:
        if not (expanded(name) / labels.INDEX).is_file():
            return open_sentences(name, self._tfds_dir)
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

    def _without_labels(self, rows: np.ndarray) -> np.ndarray:
        bare = np.zeros(len(rows), self._row_type)
        bare["tokens"], bare["segments"] = rows["tokens"], rows["segments"]
        bare["drafted"] = labels.drafted_of(rows)
        return bare


def short_name(spec: str) -> str:
    """Returns the name of a source in metrics: the last part of its path as an identifier."""
    return re.sub(r"\W+", "_", pathlib.PurePath(spec).name.partition(".")[0]).strip("_")
