"""Text that a teacher labels while its student learns, so that no labels are stored.

A source is a corpus, which is encoded and packed before the first step, or a folder of rows written
by `spectr_jax.label`, such as chats, of which only the tokens are read. Each source has a fixed
share of the rows of a batch.
"""

import functools
import pathlib
import re
from typing import Any

import ml_collections
import numpy as np

from spectr_jax.data.batches import Batches, training_batches
from spectr_jax.data.corpus import Sentences, content_digest, open_sentences
from spectr_jax.data.packed import PackedRows
from spectr_jax.data.packing import INDEX, pack_shards, read_shards
from spectr_jax.distillation import labels
from spectr_jax.distillation import teacher as teaching
from spectr_jax.distillation.labels import LabelledRows
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.base import features_shown
from spectr_jax.models.formats.runs import PACKED
from spectr_jax.models.frozen import Frozen, digest, freeze
from spectr_jax.training.preparation import pack_once
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded, read_json

FORMAT = "spectr_jax/text/1"
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

    def shares(self, config: ml_collections.ConfigDict) -> tuple[int, ...]:
        """Returns how many rows a batch has of each source by `data.shares`."""
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
        return rows

    def digests(self) -> dict[str, Any]:
        """Returns digests of the sources and of the teacher, by the fields that name them."""
        return {
            "data.train": [content_digest(source) for source in self._sources],
            "teacher": digest(self.frozen),
        }

    def batches(self, config: ml_collections.ConfigDict, workdir: pathlib.Path) -> Batches:
        """Returns the batches, without labels. Text is packed into the workdir, unless an earlier
        start of the run did.

        Raises:
          UserError: a source has no sentence to learn from.
        """
        shares = self.shares(config)
        rows = [
            source
            if isinstance(source, LabelledRows)
            else self._packed(name, source, workdir / PACKED / str(number))
            for number, (name, source) in enumerate(zip(self._names, self._sources, strict=True))
        ]
        return training_batches(
            list(zip(rows, shares, strict=True)),
            lambda taken: labels.batch_of(self._without_labels(taken)),
            config.seed,
        )

    def _packed(self, name: str, sentences: Sentences, folder: pathlib.Path) -> PackedRows:
        """Returns the rows of a corpus."""
        prompt = self._tokenizer.prompt
        if all(len(prompt(sentences[index])) < 2 for index in range(len(sentences))):
            raise UserError(
                f"data.train={name!r}: has only sentences of one token; give longer ones"
            )
        settings = {"format": FORMAT, "length": self.length, "vocabulary": self.vocabulary}
        rows_of = functools.partial(
            teaching.read_rows, tokenizer=self._tokenizer, row_type=self._row_type
        )
        pack_once(folder, lambda: pack_shards(sentences, rows_of, folder, settings, processes=0))
        return PackedRows(read_shards(folder, read_json(folder / INDEX)), self.vocabulary)

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
                read = (source[index] for index in range(enough))
                rows = teaching.read_rows(read, self._tokenizer, self._row_type)[:count]
                if not len(rows):
                    raise UserError(
                        f"data.heldout={name!r}: its first {enough} sentences have one token each; "
                        "give longer ones"
                    )
            heldout[short_name(name)] = rows
        return heldout

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

    def _without_labels(self, rows: np.ndarray) -> np.ndarray:
        bare = np.zeros(len(rows), self._row_type)
        bare["tokens"], bare["segments"] = rows["tokens"], rows["segments"]
        bare["drafted"] = rows["drafted"]
        return bare


def tokens_by_count(data: Batches, vocab_size: int, count: int) -> np.ndarray:
    """Returns the `count` most frequent tokens of the text, int32 in ascending order."""
    counted, rows, step = np.zeros(vocab_size, np.int64), 0, 0
    while rows < COUNTED_ROWS:
        batch = data(step, slice(None))
        real = batch["inputs"][batch["segments"] > 0]
        counted += np.bincount(real, minlength=vocab_size)
        rows, step = rows + len(batch["inputs"]), step + 1
    return np.sort(np.argsort(-counted, kind="stable")[:count]).astype(np.int32)


def short_name(spec: str) -> str:
    """Returns the name of a source in metrics: the last part of its path as an identifier."""
    return re.sub(r"\W+", "_", pathlib.PurePath(spec).name.partition(".")[0]).strip("_")
