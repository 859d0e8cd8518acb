"""Packed rows, and their order, which is new in each epoch.

Grain yields rows one by one, at 40 us each under the interpreter's lock, which is too slow for
small models on a fast GPU. `ShuffledRows` yields arrays of many rows. Their order and the position
(a number of rows) are those of Grain's own shuffle, so either can resume a run of the other.
"""

from typing import Any

import grain
import numpy as np

from spectr_jax.utils.files import digest


class PackedRows:
    """Random access to rows, uint16 [length], of shards that are memory-mapped or in memory.

    `tokenizer_digest` identifies the tokenizer that made them, `identity` what they were made from.
    """

    def __init__(self, shards: list[np.ndarray], tokenizer_digest: str, identity: str = ""):
        self._shards, self._identity = shards, identity
        self._ends = np.cumsum([len(shard) for shard in shards])
        self.tokenizer_digest = tokenizer_digest

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self._shards[0].shape[1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int, /) -> np.ndarray:
        return self.take(np.array([index]))[0]

    def digest(self) -> str:
        """Returns a digest of what the rows were made from, of their number, and of 256 evenly
        spaced rows."""
        picked = np.unique(np.linspace(0, len(self) - 1, 256).astype(int))
        about = f"{self._identity} {self.tokenizer_digest} {len(self)} "
        return digest(about.encode() + self.take(picked).tobytes())[:16]

    def first(self, count: int) -> np.ndarray:
        """Returns the first `count` rows, or all if there are fewer."""
        return self.take(np.arange(min(count, len(self))))

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Returns the rows at `indices`, uint16 [count, length]."""
        shards = np.searchsorted(self._ends, indices, side="right")
        from_end = indices - self._ends[shards]  # Negative: counted from the end of the shard.
        places = zip(shards.tolist(), from_end.tolist(), strict=True)
        return np.stack([self._shards[shard][index] for shard, index in places])


class ShuffledRows(grain.IterDataset):
    """Endless arrays [count, length] of every `streams`-th row starting at row `stream`, each row
    once per epoch."""

    def __init__(
        self, rows: PackedRows, *, count: int, seed: int, stream: int = 0, streams: int = 1
    ):
        super().__init__()
        self._rows, self._stream, self._streams = rows, stream, streams
        self._rows_per_epoch = len(range(stream, len(rows), streams))
        # As `seed(...).shuffle()` of Grain.
        self._seed = int(np.random.SeedSequence((seed, 1)).generate_state(1)[0])
        self.count = count

    def __iter__(self) -> grain.DatasetIterator:
        return _Iterator(self)

    def rows_from(self, first: int) -> np.ndarray:
        """Returns `count` rows, starting at row `first` counted over all epochs."""
        epochs, places = np.divmod(np.arange(first, first + self.count), self._rows_per_epoch)
        seeds = (self._seed + epochs) % 2**32
        shuffled = [
            grain.experimental.index_shuffle(place, self._rows_per_epoch - 1, seed, 4)
            for place, seed in zip(places.tolist(), seeds.tolist(), strict=True)
        ]
        return self._rows.take(self._stream + self._streams * np.array(shuffled))


class _Iterator(grain.DatasetIterator):
    def __init__(self, dataset: ShuffledRows):
        super().__init__()
        self._dataset, self._next = dataset, 0

    def __next__(self) -> np.ndarray:
        rows = self._dataset.rows_from(self._next)
        self._next += self._dataset.count
        return rows

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        self._next = state["next_index"]
