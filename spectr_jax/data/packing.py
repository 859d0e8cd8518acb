"""Packs a corpus: tokenizes it once, and writes shards of rows that are read many times faster than
text.

A row holds the targets of several sentences, each ended by EOS, then padding. A cut sentence fills
a row of its own. The tokens themselves show where each sentence begins.
"""

import collections
import contextlib
import functools
import io
import lzma
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import tqdm

from spectr_jax.data.corpus import Sentences, content_digest, corpus_digest, part
from spectr_jax.data.tokenizer import EOS, PAD, AnyTokenizer, Tokenizer
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import digest, read_json, write_json, write_whole

FORMAT = "spectr_jax/packed/1"
PACKING_BINS = 64
SENTENCES_A_SHARD = 2**16
INDEX, STARTED = "packed.json", "packing.json"
"""The index of a packed corpus, and the settings of one that is not finished."""
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, lzma.LZMAError)


def pack(
    sentences: Sentences,
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    length: int,
    compress: bool = False,
    processes: int = 1,
) -> dict[str, Any]:
    """Packs all sentences in order into `folder`: shards, tokenizer.model and finally an index,
    which is returned; see `pack_shards`.

    Sentences are cut to `length` tokens. With `compress` shards are compressed with xz, for
    copying; opening them then takes seconds longer.

    Raises:
      UserError: as `pack_shards`.
    """
    settings = {
        "format": FORMAT,
        "length": length,
        "tokenizer_sha256": digest(tokenizer.proto),
        "compress": compress,
    }
    rows_of = functools.partial(pack_rows, tokenizer=tokenizer, length=length)
    index = pack_shards(sentences, rows_of, folder, settings, processes)
    copy = folder / "tokenizer.model"
    if not copy.exists() or copy.read_bytes() != tokenizer.proto:
        write_whole(copy, tokenizer.proto)
    return index


def pack_shards(
    sentences: Sentences,
    rows_of: Callable[[Iterable[str]], np.ndarray],
    folder: pathlib.Path,
    settings: dict[str, Any],
    processes: int = 1,
) -> dict[str, Any]:
    """Writes the rows that `rows_of` makes of all sentences as shards into `folder`, and finally
    the index, which is returned: `settings`, digests of the corpus, the rows of each shard, and the
    numbers of sentences and tokens.

    Each shard has the same number of sentences, so the result does not depend on the number of
    `processes` (0: one per core). The shards of a call that was stopped are kept. If the folder
    holds the whole corpus already, nothing is written. For more sentences than a shard has, a
    program of your own needs `if __name__ == "__main__"`, because the processes import it.

    Raises:
      UserError: the folder holds other text or other settings, or a process was killed.
    """
    settings = {
        **settings,
        "sentences": len(sentences),
        "corpus": corpus_digest(sentences),
        "content": content_digest(sentences),  # Versions up to 0.3.0 know `corpus` only.
        "sentences_a_shard": SENTENCES_A_SHARD,
    }
    if finished := _finished(folder, settings):
        return finished
    folder.mkdir(parents=True, exist_ok=True)
    known = (folder / INDEX).exists() or (folder / STARTED).exists()
    starts = range(0, len(sentences), SENTENCES_A_SHARD)
    suffix = ".npy" + ".xz" * settings.get("compress", False)
    # Those of versions up to 0.3.0, named train-*, had a fixed number of rows and cannot be kept.
    paths = [folder / f"part-{number:05d}{suffix}" for number in range(len(starts))]
    if not known:  # Nothing says of which text such shards are.
        for path in paths:
            path.unlink(missing_ok=True)
    write_json(folder / STARTED, settings)
    print(f"packing {len(sentences):,} sentences: {folder}", flush=True)
    tasks = (
        (part(sentences, first, min(first + SENTENCES_A_SHARD, len(sentences))), path, rows_of)
        for first, path in zip(starts, paths, strict=True)
    )
    counts = _run_all(tasks, len(paths), processes or _cores())
    rows = {path.name: count for path, (count, _) in zip(paths, counts, strict=True)}
    index = {**settings, "tokens": sum(tokens for _, tokens in counts), "rows": rows}
    write_json(folder / INDEX, index)
    (folder / STARTED).unlink(missing_ok=True)  # Another command may have packed it too.
    return index


def read_shards(folder: pathlib.Path, index: dict[str, Any]) -> list[np.ndarray]:
    """Returns the rows of each shard, memory-mapped unless it is compressed: tokens [R, length], or
    structured [R].

    Raises an error of `DAMAGE` if a shard is missing or damaged.
    """
    shards = [_read(folder / name) for name in index["rows"]]
    if not shards:
        raise ValueError("it names no shards")
    for shard, (name, rows) in zip(shards, index["rows"].items(), strict=True):
        shape = (rows, index["length"])[: 1 if shard.dtype.names else 2]
        if shard.dtype != shards[0].dtype or shard.shape != shape:
            raise ValueError(f"{name} has {shard.dtype} {shard.shape}, not {shape}")
    return shards


def _read(path: pathlib.Path) -> np.ndarray:
    compressed = path.suffix == ".xz"
    file = io.BytesIO(lzma.decompress(path.read_bytes())) if compressed else path
    rows = np.load(file, mmap_mode=None if compressed else "r")
    # Still memory-mapped, without the overhead of NumPy's memmap for each row.
    return np.asarray(rows)


def token_type(vocab_size: int) -> type[np.unsignedinteger]:
    """Returns the type of stored tokens."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def encode(sentence: str, tokenizer: AnyTokenizer, length: int) -> list[int]:
    """Returns the targets of one sentence, cut to `length` tokens (a cut sentence has no EOS)."""
    return [*tokenizer.encode(sentence), EOS][:length]


def pack_rows(sentences: Iterable[str], tokenizer: AnyTokenizer, length: int) -> np.ndarray:
    """Returns the packed targets of all sentences, [R, length]."""
    targets = [encode(sentence, tokenizer, length) for sentence in sentences]
    places, count = first_fit(map(len, targets), length)
    rows = np.full((count, length), PAD, token_type(tokenizer.vocab_size))
    for (row, start), tokens in zip(places, targets, strict=True):
        rows[row, start : start + len(tokens)] = tokens
    return rows


def first_fit(sizes: Iterable[int], length: int) -> tuple[list[tuple[int, int]], int]:
    """Returns the row and the column at which each sequence begins, and the number of rows.

    A sequence joins the first row with room for it. If there is none among `PACKING_BINS` rows,
    these are finished, and new ones begin.
    """
    places: list[tuple[int, int]] = []
    filled: list[int] = []
    finished = 0
    for size in sizes:
        row = 0
        while row < len(filled) and filled[row] + size > length:
            row += 1
        if row == PACKING_BINS:
            finished, filled, row = finished + PACKING_BINS, [], 0
        if row == len(filled):
            filled.append(0)
        places.append((finished + row, filled[row]))
        filled[row] += size
    return places, finished + len(filled)


def _finished(folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the index of the folder if it holds the whole corpus, or None if shards are missing.
    Raises `UserError` if they are of other settings."""
    for path in (folder / INDEX, folder / STARTED):
        if not path.exists():
            continue
        index = read_json(path)
        differs = [
            f"{field}={index[field]!r}, not {value!r}"
            for field, value in settings.items()
            if field in index and index[field] != value  # Older ones have fewer fields.
        ]
        if differs:
            raise UserError(
                f"{str(folder)!r} holds a packed corpus of other text or settings "
                f"({'; '.join(differs)}); choose another folder, or remove that one"
            )
        if path.name == INDEX:
            with contextlib.suppress(*DAMAGE):
                read_shards(folder, index)
                return index
    return None


def _run_all(tasks: Iterable[tuple], count: int, processes: int) -> list[tuple[int, int]]:
    """Returns `_shard(*task)` of each of `count` tasks, in order. Few are in memory at a time."""
    bar = functools.partial(tqdm.tqdm, total=count, unit="shard", dynamic_ncols=True)
    processes = min(processes, count)
    if processes <= 1:
        return [_shard(*task) for task in bar(tasks)]
    # A forked process could inherit locks that threads of JAX hold.
    context = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(processes, context, initializer=_begin_worker) as pool:
        try:
            return list(bar(_results(pool, tasks, 2 * processes)))
        except BrokenProcessPool as error:
            raise UserError(
                f"one of {processes} processes ended early: it was killed, probably for its memory, or "
                "a script of yours lacks `if __name__ == '__main__'`; give the same command again, which "
                "resumes, or spectr_jax.pack with fewer --workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _results(
    pool: futures.Executor, tasks: Iterable[tuple], ahead: int
) -> Iterator[tuple[int, int]]:
    """Yields the result of each task, in order. At most `ahead` tasks wait or run."""
    waiting = collections.deque[futures.Future]()
    for task in tasks:
        waiting.append(pool.submit(_shard, *task))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()


def _begin_worker() -> None:
    """Lets the parent handle Ctrl-C, and ends this process if the parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _shard(
    sentences: Iterable[str], path: pathlib.Path, rows_of: Callable[[Iterable[str]], np.ndarray]
) -> tuple[int, int]:
    """Writes a shard, unless it is whole already. Returns its numbers of rows and tokens."""
    try:
        rows, none = _read(path), rows_of(())
        if (rows.dtype, rows.shape[1:]) != (none.dtype, none.shape[1:]):
            raise ValueError("rows of another form")
    except DAMAGE:
        rows = rows_of(sentences)
        file = io.BytesIO()
        np.save(file, rows)
        content = file.getvalue()
        write_whole(path, lzma.compress(content) if path.suffix == ".xz" else content)
    real = rows["segments"] if rows.dtype.names else rows
    return len(rows), int(np.count_nonzero(real))  # 0 is padding in both.


def _cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Only Linux has it.
    return len(affinity(0)) if affinity else os.cpu_count() or 1
