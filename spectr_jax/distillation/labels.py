"""Labels on disk: a teacher's likeliest next tokens after each token of a sequence.

A row holds several sequences, then padding. Each place has a token, the number of its sequence (0
is padding), whether a draft is requested after it when the target decodes, and the `TOP`
likeliest next tokens with their log-probabilities. For students that see features it also has the
teacher's last hidden state. A folder has shards of rows, each written atomically, and an index that
names the teacher.
"""

import json
import pathlib
from typing import Any

import ml_collections
import numpy as np

from spectr_jax.data.batches import Batches, training_batches
from spectr_jax.data.packed import PackedRows
from spectr_jax.data.packing import token_type
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded, parse_json, read_text, write_json

FORMAT = "spectr_jax/labels/1"
INDEX = "labels.json"
FIELDS = ("vocabulary", "vocab_size", "context", "length", "top", "features", "labelled")
"""Fields of an index in which folders that are used together must agree."""
DIGESTS = {"weights": ("dtype",), "corpus": ("text", "sentences"), "content": ()}
"""Digests in an index, and the fields that an error names with them."""
IDENTITY = ("teacher", "dtype", *DIGESTS)
"""Fields of an index that say where the labels come from. The digests of a corpus are empty for
chats."""
TOP = 64
"""Labels per place. On plain sentences, 64 tokens hold about 0.85 of SmolLM2-135M's probability."""


def row_type(vocab_size: int, length: int, features: int = 0, labelled: bool = True) -> np.dtype:
    """Returns the structured type of a row of `length` tokens with `features` features each.

    `labelled` is False in rows that the teacher labels during training.
    """
    token = token_type(vocab_size)
    fields: list[Any] = [("tokens", token, (length,)), ("segments", np.uint16, (length,))]
    fields += [("drafted", np.bool_, (length,))]
    if labelled:
        shape = (length, TOP)
        fields += [("top", token, shape), ("log_probabilities", np.float16, shape)]
    if features:
        fields.append(("features", np.float16, (length, features)))
    return np.dtype(fields)


class LabelledRows(PackedRows):
    """Random access to labelled rows of type `row_type`.

    Attributes:
      index: of the first folder.
      teacher_name: as `load` takes it.
      vocabulary: digest of the teacher's vocabulary (`AnyTokenizer.vocabulary`).
      vocab_size: size of the teacher's logits.
      context: context of the teacher, in tokens.
      features: features per place; 0 if there are none.
      labelled: whether rows have labels. Otherwise they are text to be labelled online.
      counts: number of rows of each folder.
      frozen: None, because no teacher labels them during training (`OnlineRows`).
    """

    frozen = None

    def __init__(
        self,
        shards: list[np.ndarray],
        index: dict[str, Any],
        counts: tuple[int, ...],
        identity: str,
    ):
        super().__init__(shards, index["vocabulary"], identity)
        self.index, self.teacher_name, self.counts = index, index["teacher"], counts
        self.vocabulary, self.vocab_size = index["vocabulary"], index["vocab_size"]
        self.context, self.features = index["context"], index["features"]
        self.labelled = index["labelled"]

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self._shards[0].dtype["tokens"].shape[0]

    def digests(self) -> dict[str, Any]:
        """Returns digests of what a run reads, by the fields that name it."""
        return {"data.train": self.digest()}

    def batches(self, config: ml_collections.ConfigDict, _: pathlib.Path) -> Batches:
        """Returns the batches of these rows."""
        return training_batches([(self, config.batch_size)], batch_of, config.seed)

    def heldout(self, config: ml_collections.ConfigDict) -> dict[str, np.ndarray]:
        """Returns the first rows of each held-out folder, by the last part of its path.

        Raises:
          UserError: a folder has labels of another teacher, or features that do not fit.
        """
        heldout = {}
        for name in config.data.heldout:
            rows = open_labels(name)
            if (rows.vocabulary, rows.vocab_size) != (self.vocabulary, self.vocab_size):
                raise UserError(
                    f"data.heldout={name!r}: has labels of another teacher than "
                    f"{config.data.train!r}; label them again"
                )
            check_teacher(name, rows.index, config.data.train, self.index)
            check_features(config, name, rows.features)
            heldout[pathlib.Path(name).name] = rows.first(config.data.heldout_rows)
        return heldout


def shard_path(folder: pathlib.Path, number: int) -> pathlib.Path:
    """Returns the path of a shard."""
    return folder / f"labels-{number:05d}.npy"


def claim_folder(folder: pathlib.Path, about: dict[str, Any]) -> dict[str, Any]:
    """Creates a folder of labels with its index, or checks that an existing index agrees. Returns
    the index.

    If there are no shards, an existing index is replaced. An existing number of sequences per shard
    is kept.

    Args:
      folder: the folder.
      about: JSON values that identify the labels, at least `FIELDS` without `top`, `IDENTITY` and
        `shard`, the number of sequences per shard.

    Raises:
      UserError: the folder holds other labels, or other files.
    """
    wanted = {"format": FORMAT, "top": TOP, "drafted": True, **about}
    if any(folder.glob("labels-*.npy")):
        there = _index(folder)
        _check_same(folder, there, {**wanted, "shard": there["shard"]})
        return there
    folder.mkdir(parents=True, exist_ok=True)
    ours = ("labels", ".")  # The index, partial shards of a killed command, and hidden files.
    others = sorted(path.name for path in folder.iterdir() if not path.name.startswith(ours))
    if others:
        raise UserError(
            f"--out={folder}: has other files, such as {others[0]!r}; give a folder of its own"
        )
    write_json(folder / INDEX, wanted)
    return wanted


def _check_same(folder: pathlib.Path, there: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises `UserError` unless two indices describe the same labels."""
    # One corpus may have two paths, so its digest decides.
    ignored = DIGESTS["corpus"] if there["corpus"] else ()
    for name in [*IDENTITY, *sorted(wanted.keys() | there.keys())]:
        if name in ignored or wanted.get(name) == there.get(name):
            continue
        has, makes = (
            ", ".join(f"{field}={index.get(field)!r}" for field in (name, *DIGESTS.get(name, ())))
            for index in (there, wanted)
        )
        raise UserError(
            f"--out={folder}: has labels of {has}, this command makes {makes}; choose another "
            "folder, or give the flags that it was made with"
        )


def open_labels(name: str, counts: tuple[int, ...] = ()) -> LabelledRows:
    """Returns the memory-mapped rows of a folder, or of several with commas between them.

    Args:
      name: the folders.
      counts: number of first rows to take from each; all by default.

    Raises:
      UserError: there are no rows, a shard is damaged or missing, teachers or lengths differ, or
        there are fewer rows than `counts`.
    """
    folders = [expanded(part.strip()) for part in name.split(",")]
    indices = [_index(folder) for folder in folders]
    first = indices[0]
    for folder, index in zip(folders, indices, strict=True):
        for field in FIELDS:
            if index[field] != first[field]:
                raise UserError(
                    f"{str(folder)!r} has labels of {field}={index[field]!r} and "
                    f"{str(folders[0])!r} of {first[field]!r}; give folders that agree"
                )
        check_teacher(str(folder), index, str(folders[0]), first)
    shape = ("vocab_size", "length", "features", "labelled")
    wanted = row_type(*(first[field] for field in shape))
    shards_of = [_open_shards(folder, wanted) for folder in folders]
    there = tuple(sum(map(len, shards)) for shards in shards_of)
    if not any(there):
        raise UserError(
            f"{name!r} has no labelled rows yet; make some: python -m spectr_jax.label "
            f"--out={folders[0]} ..."
        )
    if counts and len(counts) != len(folders):
        raise other_sources(len(folders), len(counts))
    taken = counts or there
    shards = []
    for folder, opened, have, need in zip(folders, shards_of, there, taken, strict=True):
        if have < need:
            raise UserError(
                f"{str(folder)!r} has {have} rows, and had {need} before; restore its shards, or "
                "label again"
            )
        for shard in opened:
            shards.append(shard[:need])
            need -= len(shards[-1])
    return LabelledRows(shards, first, taken, json.dumps(indices))


def other_sources(there: int, before: int) -> UserError:
    """Returns the error for a resumed run with another number of sources."""
    return UserError(
        f"data.train: names {there} sources, and named {before} when the run began; restore it, or "
        "choose a new --workdir"
    )


def check_teacher(name: str, index: dict[str, Any], other_name: str, other: dict[str, Any]) -> None:
    """Raises `UserError` if the indices of two folders name different teachers.

    Digests of weights decide within one dtype, names across two.
    """
    field = "weights" if index["dtype"] == other["dtype"] else "teacher"
    if index[field] != other[field]:
        raise UserError(
            f"{name!r} has labels of {index['teacher']!r} ({index['weights']}) and {other_name!r} of "
            f"{other['teacher']!r} ({other['weights']}), another teacher; label one of them again"
        )


def check_features(config: ml_collections.ConfigDict, name: str, features: int) -> None:
    """Raises `UserError` if a student sees features, and a source `name` has others."""
    if config.model.features not in (0, features):
        fix = "set it, and model.width, to that" if features else "label with --features"
        raise UserError(
            f"model.features={config.model.features}: {name!r} has {features} features per token; "
            f"{fix}"
        )


def batch_of(rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the batch of labelled rows [B].

    Returns:
      `inputs`, `segments`, `positions` and `targets` (the next token of the sequence, -1 at its
      end), int32 [B, N]; `drafted`, bool [B, N], True after which a draft is requested; with labels
      `top` int32 and `log_probabilities` float32, [B, N, TOP]; with features `features` float16
      [B, N, F].
    """
    fields = rows.dtype.names or ()
    tokens, segments = rows["tokens"].astype(np.int32), rows["segments"].astype(np.int32)
    places = np.arange(tokens.shape[1])
    first = np.diff(segments, axis=1, prepend=0) != 0
    positions = places - np.maximum.accumulate(np.where(first, places, 0), axis=1)
    ends = np.roll(segments, -1, axis=1) != segments
    ends[:, -1] = True
    batch = {
        "inputs": tokens,
        "segments": segments,
        "positions": np.where(segments > 0, positions, 0).astype(np.int32),
        "targets": np.where(ends, -1, np.roll(tokens, -1, axis=1)).astype(np.int32),
        "drafted": rows["drafted"],
    }
    if "top" in fields:
        batch["top"] = rows["top"].astype(np.int32)
        batch["log_probabilities"] = rows["log_probabilities"].astype(np.float32)
    if "features" in fields:
        batch["features"] = rows["features"]
    return batch


def _index(folder: pathlib.Path) -> dict[str, Any]:
    try:
        index = parse_json(read_text(folder / INDEX))
        if index["format"] != FORMAT or index["top"] != TOP:
            raise ValueError(f"format {index['format']!r} with {index['top']} labels a place")
        if missing := [name for name in (*FIELDS, *IDENTITY, "shard") if name not in index]:
            raise ValueError(f"{INDEX} does not say {missing[0]}")
        return index
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{str(folder)!r} has no labels that can be read ({error}); make some: python -m "
            "spectr_jax.label"
        ) from error


def _open_shards(folder: pathlib.Path, wanted: np.dtype) -> list[np.ndarray]:
    """Returns the memory-mapped shards of a folder in order.

    None may be missing, because a resumed run would get other rows.
    """
    shards = []
    for number, path in enumerate(sorted(folder.glob("labels-*.npy"))):
        if path != (expected := shard_path(folder, number)):
            raise UserError(
                f"{str(folder)!r} has {path.name} and no {expected.name}; run `label` there again, "
                "which makes it"
            )
        try:
            rows = np.load(path, mmap_mode="r")
            if rows.dtype != wanted or rows.ndim != 1:
                raise ValueError(f"{rows.dtype} {rows.shape}")
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"{str(path)!r} cannot be read ({error}); remove it, and label again"
            ) from error
        shards.append(np.asarray(rows))
    return shards
