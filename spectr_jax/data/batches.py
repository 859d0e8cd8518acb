"""From sentences to packed batches, with Grain.

Several sentences share one row of a batch; `segments` numbers them (0 is padding) so that none attends to another, and
`positions` starts at 0 in each. Inputs are BOS and the pieces, targets the pieces and EOS.
"""

from typing import Any

import grain
import numpy as np

from spectr_jax.data.corpus import Sentences
from spectr_jax.data.tokenizer import BOS, EOS, PAD, Tokenizer

PACKING_BINS = 64
PREFETCHED_BATCHES = 4


def encode(sentence: str, tokenizer: Tokenizer, length: int) -> np.ndarray:
    """The targets of one sentence, cut to `length` tokens (a cut sentence has no EOS)."""
    return np.asarray([*tokenizer.encode(sentence), EOS], np.int32)[:length]


def training_batches(
    sentences: Sentences,
    tokenizer: Tokenizer,
    *,
    batch: int,
    length: int,
    seed: int,
    streams: int = 1,
    process: int = 0,
    processes: int = 1,
) -> grain.IterDataset:
    """An endless, shuffled pipeline of packed batches; each epoch is shuffled anew.

    Sentence i belongs to stream i modulo `streams`. Each stream shuffles and packs its own, and a batch takes as many rows
    from each. So the batches depend on the number of streams, and not on that of processes, which read their own streams.

    Args:
      sentences: the corpus.
      tokenizer: pieces.
      batch: rows over all processes, a multiple of `streams`.
      length: tokens a row.
      seed: of the shuffle.
      streams: how many, a multiple of `processes`.
      process: index of this process.
      processes: how many there are.

    Returns:
      A dataset of dicts `inputs`, `targets`, `segments`, `positions`, int32 [batch / processes, length]. `positions_of` and
      `go_to` read and set the place of its iterator.
    """
    corpus = grain.MapDataset.source(sentences)
    share = streams // processes
    mine = []
    for stream in range(process * share, (process + 1) * share):
        shuffled = corpus[stream::streams].seed(seed + stream).shuffle()
        mine.append(_packed(shuffled.repeat(), tokenizer, batch // streams, length, threads=0))
    joined = grain.experimental.ZipIterDataset(mine).map(_join)
    return grain.experimental.ThreadPrefetchIterDataset(joined, prefetch_buffer_size=PREFETCHED_BATCHES)


def positions_of(iterator: grain.DatasetIterator) -> list[dict[str, Any]]:
    """The place in each stream of this process, as JSON values."""
    return iterator.get_state()["parents"]


def go_to(iterator: grain.DatasetIterator, positions: list[dict[str, Any]]) -> None:
    """Sets the place in each stream of this process."""
    iterator.set_state({"parents": positions})


def evaluation_batches(sentences: Sentences, tokenizer: Tokenizer, *, batch: int, length: int) -> grain.IterDataset:
    """All sentences once, in order, packed; the last batch may have fewer rows."""
    return _packed(grain.MapDataset.source(sentences), tokenizer, batch, length)


def _packed(dataset: grain.MapDataset, tokenizer: Tokenizer, batch: int, length: int, threads: int = 1) -> grain.IterDataset:
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    encoded = dataset.map(lambda sentence: {"targets": encode(sentence, tokenizer, length)}).to_iter_dataset(options)
    rows = grain.experimental.FirstFitPackIterDataset(
        encoded, length_struct={"targets": length}, num_packing_bins=PACKING_BINS, shuffle_bins=False
    )
    return rows.batch(batch, drop_remainder=False).map(_with_inputs)


def _join(parts: tuple[dict[str, np.ndarray], ...]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _with_inputs(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Inputs are the targets one later, with BOS before the first of each sentence."""
    targets, segments, positions = (packed[name] for name in ("targets", "targets_segment_ids", "targets_positions"))
    before = np.where(positions == 0, BOS, np.roll(targets, 1, axis=1))
    inputs = np.where(segments > 0, before, PAD).astype(np.int32)
    return {"inputs": inputs, "targets": targets, "segments": segments, "positions": positions}
