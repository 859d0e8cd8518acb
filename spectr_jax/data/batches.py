"""From sentences to packed batches, with Grain.

Several sentences share one row of a batch; `segments` numbers them (0 is padding) so that none attends to another, and
`positions` starts at 0 in each. Inputs are BOS and the pieces, targets the pieces and EOS.
"""

from typing import Any

import grain
import numpy as np

from spectr_jax.data.corpus import Sentences
from spectr_jax.data.tokenizer import BOS, EOS, Tokenizer

PACKING_BINS = 64


def encode(sentence: str, tokenizer: Tokenizer, length: int) -> dict[str, np.ndarray]:
    """One sentence as `inputs` and `targets`, cut to `length` tokens (a cut sentence has no EOS)."""
    pieces = tokenizer.encode(sentence)
    return {
        "inputs": np.asarray([BOS, *pieces], np.int32)[:length],
        "targets": np.asarray([*pieces, EOS], np.int32)[:length],
    }


def training_batches(
    sentences: Sentences,
    tokenizer: Tokenizer,
    *,
    batch: int,
    length: int,
    seed: int,
    process: int = 0,
    processes: int = 1,
) -> grain.IterDataset:
    """An endless, shuffled pipeline of packed batches; each epoch is shuffled anew.

    Its iterator has `get_state` and `set_state`, so a run can go on where it stopped.

    Args:
      sentences: the corpus.
      tokenizer: pieces.
      batch: rows of this process.
      length: tokens a row.
      seed: of the shuffle.
      process: index of this process; it reads every `processes`-th sentence, so no two read the same one.
      processes: how many there are.

    Returns:
      A dataset of dicts `inputs`, `targets`, `segments`, `positions`, int32 [batch, length].
    """
    dataset = grain.MapDataset.source(sentences).seed(seed).shuffle()[process::processes].repeat()
    return _packed(dataset, tokenizer, batch, length)


def evaluation_batches(sentences: Sentences, tokenizer: Tokenizer, *, batch: int, length: int) -> grain.IterDataset:
    """All sentences once, in order, packed; the last batch may have fewer rows."""
    return _packed(grain.MapDataset.source(sentences), tokenizer, batch, length)


def _packed(dataset: grain.MapDataset, tokenizer: Tokenizer, batch: int, length: int) -> grain.IterDataset:
    encoded = dataset.map(lambda sentence: encode(sentence, tokenizer, length)).to_iter_dataset()
    rows = grain.experimental.FirstFitPackIterDataset(
        encoded,
        length_struct={"inputs": length, "targets": length},
        num_packing_bins=PACKING_BINS,
        shuffle_bins=False,
    )
    return rows.map(_rename).batch(batch, drop_remainder=False)


def _rename(row: dict[str, Any]) -> dict[str, np.ndarray]:
    return {
        "inputs": row["inputs"],
        "targets": row["targets"],
        "segments": row["inputs_segment_ids"],
        "positions": row["inputs_positions"],
    }
