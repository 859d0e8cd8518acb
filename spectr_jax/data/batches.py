"""Turns sentences or packed rows into batches with Grain.

Several sentences share a row. `segments` numbers them (0 is padding) so that none attends to
another, and `positions` starts at 0 in each. Inputs are BOS and the pieces; targets are the pieces
and EOS.
"""

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from spectr_jax.data.corpus import Sentences
from spectr_jax.data.packing import PACKING_BINS
from spectr_jax.data.shuffled import PackedRows, ShuffledRows
from spectr_jax.data.tokenizer import BOS, EOS, PAD, Tokenizer
from spectr_jax.utils.errors import UserError

PREFETCHED_BATCHES = 4


def encode(sentence: str, tokenizer: Tokenizer, length: int) -> np.ndarray:
    """Returns the targets of one sentence, cut to `length` tokens (a cut sentence has no EOS)."""
    return np.asarray([*tokenizer.encode(sentence), EOS], np.int32)[:length]


def training_batches(
    corpus: Sentences | PackedRows,
    tokenizer: Tokenizer,
    *,
    batch: int,
    length: int,
    seed: int,
    streams: int = 1,
    process: int = 0,
    processes: int = 1,
) -> grain.IterDataset:
    """Returns an endless, shuffled pipeline of packed batches. Each epoch has its own order.

    A batch is a dict of `inputs`, `targets`, `segments`, `positions`, int32 [batch / processes,
    length]. `positions_of` and `go_to` get and set the position of an iterator.

    Sentence i (or packed row i) belongs to stream i modulo `streams`. Each stream is shuffled and
    packed separately, and a batch takes the same number of rows from each. Batches therefore depend
    on the number of streams, not on the number of processes, each of which reads its own streams.
    `batch` (rows over all processes) is a multiple of `streams`, which is one of `processes`.

    Raises:
      UserError: there are fewer sentences, or rows, than streams.
    """
    if len(corpus) < streams:
        what = "packed rows" if isinstance(corpus, PackedRows) else "sentences"
        raise UserError(
            f"the corpus has {len(corpus)} {what}, too few for {streams} streams; give more text, "
            f"or lower data.streams to {len(corpus)}"
        )
    if isinstance(corpus, PackedRows):
        return row_batches(corpus, _batch_of, batch, seed, streams, process, processes)

    def stream_of(stream: int) -> grain.IterDataset:
        sentences = shuffled(corpus, seed, stream, streams)
        return _packed_rows(sentences, tokenizer, length, threads=0).batch(batch // streams)

    return mixed_batches([stream_of], _batch_of, streams, process, processes)


def shuffled(corpus: Sentences, seed: int, stream: int, streams: int) -> grain.MapDataset:
    """Returns the sentences of one stream, endlessly, in a new order in each epoch."""
    return grain.MapDataset.source(corpus)[stream::streams].seed(seed + stream).shuffle().repeat()


def row_batches(
    rows: PackedRows,
    batch_of: Callable[[np.ndarray], dict[str, np.ndarray]],
    batch: int,
    seed: int,
    streams: int = 1,
    process: int = 0,
    processes: int = 1,
) -> grain.IterDataset:
    """Returns the pipeline of `training_batches` for packed rows. `batch_of` makes a batch of rows."""

    def stream_of(stream: int) -> grain.IterDataset:
        return ShuffledRows(
            rows, count=batch // streams, seed=seed + stream, stream=stream, streams=streams
        )

    return mixed_batches([stream_of], batch_of, streams, process, processes)


def mixed_batches(
    sources: Sequence[Callable[[int], grain.IterDataset]],
    batch_of: Callable[[np.ndarray], dict[str, np.ndarray]],
    streams: int,
    process: int = 0,
    processes: int = 1,
) -> grain.IterDataset:
    """Returns the pipeline of `training_batches` over several sources.

    Each source maps the index of a stream to a dataset of arrays of rows. A batch concatenates one
    array from each stream of each source.
    """
    share = streams // processes
    mine = range(process * share, (process + 1) * share)
    parts = [source(stream) for stream in mine for source in sources]
    batches = grain.experimental.ZipIterDataset(parts).map(
        lambda rows: batch_of(np.concatenate(rows))
    )
    return grain.experimental.ThreadPrefetchIterDataset(
        batches, prefetch_buffer_size=PREFETCHED_BATCHES
    )


def positions_of(iterator: grain.DatasetIterator) -> list[dict[str, Any]]:
    """Returns the position in each stream of this process, as JSON values."""
    return iterator.get_state()["parents"]


def go_to(iterator: grain.DatasetIterator, positions: list[dict[str, Any]]) -> None:
    """Sets the position in each stream of this process."""
    iterator.set_state({"parents": positions})


def evaluation_batches(
    sentences: Sentences, tokenizer: Tokenizer, *, batch: int, length: int
) -> grain.IterDataset:
    """Returns all sentences once, in order, packed. The last batch may have fewer rows."""
    rows = _packed_rows(grain.MapDataset.source(sentences), tokenizer, length)
    return rows.batch(batch, drop_remainder=False).map(_batch_of)


def _packed_rows(
    dataset: grain.MapDataset, tokenizer: Tokenizer, length: int, threads: int = 1
) -> grain.IterDataset:
    """Returns packed targets [length] of the sentences in `dataset`."""
    encoded = dataset.map(lambda sentence: {"targets": encode(sentence, tokenizer, length)})
    rows = grain.experimental.FirstFitPackIterDataset(
        encoded.to_iter_dataset(
            grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
        ),
        length_struct={"targets": length},
        num_packing_bins=PACKING_BINS,
        shuffle_bins=False,
    )
    return rows.map(lambda row: row["targets"])


def _batch_of(targets: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the batch of packed targets [B, length].

    A sentence begins after each EOS. PAD follows only the last sentence, and a cut sentence without
    EOS fills its row. Inputs are the targets shifted by one, with BOS first in each sentence.
    """
    first = np.roll(targets == EOS, 1, axis=1)
    first[:, 0] = True
    columns = np.arange(targets.shape[1])
    batch = {
        "inputs": np.where(first, BOS, np.roll(targets, 1, axis=1)),
        "targets": targets,
        "segments": np.cumsum(first, axis=1),
        "positions": columns - np.maximum.accumulate(np.where(first, columns, 0), axis=1),
    }
    real = targets != PAD
    return {name: np.where(real, array, PAD).astype(np.int32) for name, array in batch.items()}
