"""Batches of packed rows. The batch of a step is a function of the rows, the seed and the step.

Several sentences share a row. `segments` numbers them (0 is padding) so that none attends to
another, and `positions` starts at 0 in each. Inputs are BOS and the pieces; targets are the pieces
and EOS.
"""

import functools
from collections.abc import Callable, Sequence

import grain
import numpy as np

from spectr_jax.data.packed import PackedRows
from spectr_jax.data.tokenizer import BOS, EOS, PAD

READ_AHEAD = 4
"""Number of batches that a thread reads before they are needed."""

Batch = dict[str, np.ndarray]
Batches = Callable[[int, slice], Batch]
"""Returns the rows of a slice of a step's batch. Steps count from 0."""


def training_batches(
    sources: Sequence[tuple[PackedRows, int]], batch_of: Callable[[np.ndarray], Batch], seed: int
) -> Batches:
    """Returns the batches over `sources`, each given with its number of rows in a batch.

    The rows of a batch are in the order of the sources. `batch_of` maps those of one source to
    arrays [rows, ...].
    """
    owners = np.repeat(np.arange(len(sources)), [size for _, size in sources])

    def batch(step: int, mine: slice) -> Batch:
        ranges = [np.arange(step * size, (step + 1) * size) for _, size in sources]
        places, owner, parts = np.concatenate(ranges)[mine], owners[mine], []
        for number in np.unique(owner):
            source, _ = sources[number]
            rows = shuffled(len(source), (seed, int(number)), places[owner == number])
            parts.append(batch_of(source.take(rows)))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    return batch


def shuffled(count: int, seed: tuple[int, ...], places: np.ndarray) -> np.ndarray:
    """Returns the rows at `places` of an endless order of `count` rows, int [places].

    Each epoch, `count` places, has every row once, in an order of its own.
    """
    epochs, places = np.divmod(places, count)
    rows = np.empty(len(places), np.int64)
    for epoch in np.unique(epochs).tolist():
        rows[epochs == epoch] = _order(count, (*seed, epoch))[places[epochs == epoch]]
    return rows


@functools.lru_cache(maxsize=8)
def _order(count: int, seed: tuple[int, ...]) -> np.ndarray:
    """Returns the order of one epoch; kept, because a batch needs few of its places."""
    return np.random.default_rng(seed).permutation(np.arange(count, dtype=np.uint32))


def read_ahead(batches: Batches, mine: slice, first: int, end: int) -> grain.DatasetIterator:
    """Returns the slice `mine` of the batches of steps `first` to `end` - 1. A thread reads them
    ahead until the iterator is closed."""
    steps = grain.MapDataset.range(first, end).map(lambda step: batches(step, mine))
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=READ_AHEAD)
    return iter(steps.to_iter_dataset(options))


def batch_of(targets: np.ndarray) -> dict[str, np.ndarray]:
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
