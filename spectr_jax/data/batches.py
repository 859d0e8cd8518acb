"""Turns sentences or packed rows into batches with Grain.

Several sentences share a row. `segments` numbers them (0 is padding) so that none attends to
another, and `positions` starts at 0 in each. Inputs are BOS and the pieces; targets are the pieces
and EOS.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from spectr_jax.data.corpus import Sentences
from spectr_jax.data.packed import PackedRows, ShuffledRows
from spectr_jax.data.packing import PACKING_BINS, encode
from spectr_jax.data.tokenizer import BOS, EOS, PAD, Tokenizer

PREFETCHED_BATCHES = 4


def training_batches(
    corpus: Sentences | PackedRows,
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    length: int,
    seed: int,
    streams: int = 1,
    mine: slice = slice(None),
) -> grain.IterDataset:
    """Returns an endless, shuffled pipeline of packed batches. Each epoch has its own order.

    A batch is a dict of `inputs`, `targets`, `segments`, `positions`, int32 [B, length], where B is
    this process's share of `batch_size`. `positions_of` and `go_to` get and set the position of an
    iterator.

    Sentence i (or packed row i) belongs to stream i modulo `streams`. Each stream is shuffled and
    packed separately, and a batch takes the same number of rows from each. Batches therefore depend
    on the number of streams, not on the number of processes, each of which reads the streams `mine`
    (`hosts.own_share`). `streams` divides `batch_size`, and none is empty.
    """
    if isinstance(corpus, PackedRows):
        return row_batches(corpus, _batch_of, batch_size, seed, streams, mine)

    def rows_of_stream(stream: int) -> grain.IterDataset:
        sentences = shuffled(corpus, seed, stream, streams)
        rows = _packed_rows(sentences, tokenizer, length, threads=0)
        return rows.batch(batch_size // streams)

    return mixed_batches([rows_of_stream], _batch_of, streams, mine)


def shuffled(corpus: Sentences, seed: int, stream: int, streams: int) -> grain.MapDataset:
    """Returns the sentences of one stream, endlessly, in a new order in each epoch."""
    return grain.MapDataset.source(corpus)[stream::streams].seed(seed + stream).shuffle().repeat()


def row_batches(
    rows: PackedRows,
    batch_of: Callable[[np.ndarray], dict[str, np.ndarray]],
    batch_size: int,
    seed: int,
    streams: int = 1,
    mine: slice = slice(None),
) -> grain.IterDataset:
    """Returns the pipeline of `training_batches` for packed rows. `batch_of` makes a batch of rows."""
    share = functools.partial(ShuffledRows, rows, batch_size // streams, seed, streams)
    return mixed_batches([share], batch_of, streams, mine)


def mixed_batches(
    rows_of_streams: Sequence[Callable[[int], grain.IterDataset]],
    batch_of: Callable[[np.ndarray], dict[str, np.ndarray]],
    streams: int,
    mine: slice,
) -> grain.IterDataset:
    """Returns the pipeline of `training_batches` over several sources.

    `rows_of_streams` has a function for each source, which maps the index of a stream to a dataset
    of arrays of rows. A batch concatenates one array from each stream of each source.
    """
    parts = [rows_of(stream) for stream in range(streams)[mine] for rows_of in rows_of_streams]
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
    sentences: Sentences, tokenizer: Tokenizer, *, batch_size: int, length: int
) -> grain.IterDataset:
    """Returns all sentences once, in order, packed. The last batch may have fewer rows."""
    rows = _packed_rows(grain.MapDataset.source(sentences), tokenizer, length)
    return rows.batch(batch_size, drop_remainder=False).map(_batch_of)


def _packed_rows(
    dataset: grain.MapDataset, tokenizer: Tokenizer, length: int, threads: int = 1
) -> grain.IterDataset:
    """Returns packed targets [length] of the sentences in `dataset`."""
    encoded = dataset.map(
        lambda sentence: {"targets": np.asarray(encode(sentence, tokenizer, length), np.int32)}
    )
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
