"""Checks before the first step: the config, the workdir and the tokenizer."""

import contextlib
import dataclasses
import fcntl
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_collections
from flax import nnx
from flax.traverse_util import flatten_dict

from spectr_jax.data.corpus import PACKED_PREFIX, Sentences, sample_sentences
from spectr_jax.data.packed import PackedRows, open_packed
from spectr_jax.data.packing import INDEX, pack
from spectr_jax.data.tokenizer import Tokenizer, train_tokenizer
from spectr_jax.models.formats.published import weights_path
from spectr_jax.models.formats.runs import CONFIG, PACKED, TOKENIZER, kind_of
from spectr_jax.models.formats.weights import load_weights, weight_files
from spectr_jax.training.config import train_config
from spectr_jax.training.optimizer import OPTIMIZERS, SCHEDULES, make_schedule
from spectr_jax.utils import hosts
from spectr_jax.utils.config import check_fields, check_positive, to_json
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import digest, exclusive, expanded, read_json, write_json, write_whole

INPUTS = "inputs.json"
"""File with digests of the data that a run reads."""
# Fields that may change between two starts of a run. Any other change makes it another run. Paths
# of data may change too, because the digests in INPUTS decide; older runs have none.
FREE_FIELDS = (
    *("steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints"),
    *("mesh.fsdp", "accumulate", "remat"),
    "data.streams",  # Of versions up to 0.3.0.
)
POSITIVE_FIELDS = (
    *("steps", "batch_size", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints"),
    *("model.layers", "model.width", "model.mlp", "model.heads"),
    *("mesh.fsdp", "accumulate"),
)


def check_train_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid training config."""
    check_shared(config, train_config())
    check_positive(config, "model.context", "data.heldout_sentences")
    model, exits = config.model, config.early_exit
    if not 0.0 <= model.dropout < 1.0:
        raise UserError(f"model.dropout={model.dropout}: must be in [0, 1); 0.1 is common")
    if not 0 <= exits.layer < model.layers:
        raise UserError(
            f"early_exit.layer={exits.layer}: must be below model.layers={model.layers}; lower it, "
            "or give 0 for no exit"
        )
    if not exits.weight >= 0:
        raise UserError(f"early_exit.weight={exits.weight}: must not be negative; 0.5 is common")


def check_shared(config: ml_collections.ConfigDict, defaults: ml_collections.ConfigDict) -> None:
    """Raises `UserError` if the fields are not those of `defaults`, or for an invalid one of those
    that the configs of language models and of students share."""
    check_fields(config, defaults)
    check_positive(config, *POSITIVE_FIELDS)
    model, optimizer = config.model, config.optimizer
    if model.width % (2 * model.heads):
        raise UserError(
            f"model.width={model.width}: must be a multiple of 2 * model.heads={model.heads}; "
            "change one"
        )
    if model.dtype not in ("float32", "bfloat16"):
        raise UserError(f"model.dtype={model.dtype!r}: must be 'float32' or 'bfloat16'")
    for name, known in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
        if optimizer[name] not in known:
            raise unknown(f"optimizer.{name}", optimizer[name], known)
    if config.seed < 0:
        raise UserError(f"seed={config.seed}: must be at least 0")
    for name in ("learning_rate", "warmup_steps", "weight_decay", "clip_norm"):
        if not optimizer[name] >= 0:
            raise UserError(f"optimizer.{name}={optimizer[name]}: must be at least 0")
    for name in ("b1", "b2"):
        if not 0 <= optimizer[name] < 1:
            raise UserError(f"optimizer.{name}={optimizer[name]}: must be in [0, 1)")


def check_batch_size(config: ml_collections.ConfigDict, devices: int) -> None:
    """Raises `UserError` if the rows of a batch cannot be split evenly."""
    if config.batch_size % (devices * config.accumulate):
        raise UserError(
            f"batch_size={config.batch_size}: must divide over {devices} devices in "
            f"accumulate={config.accumulate} parts; give a multiple of "
            f"{devices * config.accumulate}"
        )


def initial_params(config: ml_collections.ConfigDict, tokenizer: Tokenizer) -> nnx.State | None:
    """Returns the parameters that `config.init` names, in float32, or None if it names none.

    Raises:
      UserError: they cannot be read, or have another shape or tokenizer than the run.
    """
    if not config.init:
        return None
    model, tokenizer_digest = load_weights(weights_path(config.init))
    stored = dataclasses.asdict(model.config)
    for name, wanted in sorted(config.model.items()):
        if name not in ("dtype", "dropout") and wanted != stored[name]:
            raise UserError(
                f"model.{name}={wanted}: init={config.init!r} has {stored[name]}; change one of "
                "them"
            )
    if digest(tokenizer.proto) != tokenizer_digest:
        raise UserError(
            f"init={config.init!r}: has another tokenizer than data.tokenizer; give that of init"
        )
    return nnx.state(model)


def check_workdir(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, defaults: ml_collections.ConfigDict
) -> None:
    """Checks that a run in `workdir` has this config, and creates the folder if there is none.

    A field that the run lacks is newer, and had its value in `defaults`.

    Raises:
      UserError: it holds a run of another config, or cannot be created, or the initial weights of
        a new run are missing.
    """
    path = workdir / CONFIG
    if path.exists():
        stored = read_json(path)
        stored["kind"] = kind_of(stored)
        _check_steps(config, workdir, stored)
        free = [*FREE_FIELDS, *_inputs(workdir)]
        if "data.train" in free:
            free.append("data.tfds_dir")
        if (workdir / TOKENIZER).exists():  # `open_tokenizer` compares the content.
            free.append("data.tokenizer")
        theirs = flatten_dict(to_json(defaults), sep=".") | flatten_dict(stored, sep=".")
        ours = flatten_dict(to_json(config), sep=".")
        for name in ["kind", *sorted(ours.keys() | theirs.keys())]:
            if name not in free and ours.get(name) != theirs.get(name):
                raise UserError(
                    f"{name}={ours.get(name)!r}: the run in {str(workdir)!r} has "
                    f"{theirs.get(name)!r}; choose a new --workdir, or restore the field"
                )
    elif config.init and not weight_files(weights_path(config.init)):
        raise UserError(
            f"init={config.init!r}: is not a model; give a file, or FOLDER/NAME, that "
            "spectr_jax.export wrote, or a published one such as 6m"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"workdir={str(workdir)!r}: cannot be created ({error.strerror}); choose another"
        ) from error


def _check_steps(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, stored: dict[str, Any]
) -> None:
    """Raises `UserError` if another number of steps would make the learning rate jump at the newest
    checkpoint."""
    before = stored.get("steps", config.steps)
    folders = [path.name for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]
    taken = max(map(int, folders), default=0)
    if before == config.steps or not 0 < taken < config.steps:
        return
    old, new = (
        float(make_schedule(config.optimizer, steps)(taken)) for steps in (before, config.steps)
    )
    if not math.isclose(old, new, rel_tol=1e-6):
        raise UserError(
            f"steps={config.steps}: the learning rate of the run in {str(workdir)!r} would jump "
            f"from {old:.3g} to {new:.3g}, because schedule={config.optimizer.schedule!r} ends at "
            f"steps={before}; restore that, or export the model and give it as init in a new "
            "--workdir"
        )


def _inputs(workdir: pathlib.Path) -> dict[str, Any]:
    path = workdir / INPUTS
    return read_json(path) if path.exists() else {}


def check_inputs(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, digests: dict[str, Any]
) -> None:
    """Stores in a checked workdir the `digests` of what a run reads, by the fields that name it.

    Those of an earlier start must be equal. A run of an older version has none and gets them.

    Raises:
      UserError: the content of an input has changed since the run's first start, or differs between
        processes.
    """
    if any(others != digests for others in hosts.gather(digests)):
        raise UserError(
            "data: its content differs between the processes; give all of them the same files"
        )
    before = _inputs(workdir)
    fields = flatten_dict(to_json(config), sep=".")
    for name, digest_now in digests.items():
        if before.get(name, digest_now) != digest_now:
            raise UserError(
                f"{name}={fields[name]!r}: its content has changed since the run in "
                f"{str(workdir)!r} began; restore it, or choose a new --workdir"
            )
    if hosts.is_first() and before != digests:
        write_json(workdir / INPUTS, digests)


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """A context in which no other run writes to `workdir`. A process that dies inside leaves no
    lock.

    Raises:
      UserError: another run is active.
    """
    if not hosts.is_first():
        yield
        return
    with (workdir / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"workdir={str(workdir)!r}: another process trains there; wait, or choose another"
            ) from error
        yield


def open_tokenizer(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, corpus: Sentences | PackedRows
) -> Tokenizer:
    """Returns the run's tokenizer: `data.tokenizer`, or the one next to `init`, or the run's own.
    The workdir keeps a copy.

    If the file is missing, the first process trains a tokenizer on the corpus. A run from `init`
    trains none, because its weights have one.

    Raises:
      UserError: the tokenizer has another vocabulary than the model, or differs from the run's
        earlier one or from that of the packed corpus.
    """
    copy = shared = workdir / TOKENIZER
    if config.data.tokenizer:
        shared = expanded(config.data.tokenizer)
    elif config.init:
        shared = weights_path(config.init).parent / TOKENIZER
    if copy.exists() and not shared.exists():  # Its folder has moved since the run began.
        shared = copy
    if config.init and not shared.exists():
        raise UserError(
            f"init={config.init!r}: there is no tokenizer at {str(shared)!r}; copy that of the "
            "weights there"
        )
    if isinstance(corpus, PackedRows):
        _check_packed(config, corpus, shared)
    elif hosts.is_first():
        # Runs that share a tokenizer may start together.
        with contextlib.nullcontext() if shared.exists() else exclusive(shared):
            if not shared.exists():
                print(f"training a tokenizer of {config.model.vocab_size} pieces: {shared}")
                sample = sample_sentences(corpus, config.data.tokenizer_sentences, config.seed)
                train_tokenizer(sample, shared, config.model.vocab_size)
            elif not copy.exists():
                print(f"using the tokenizer that is there: {shared}")
    hosts.wait_for_all("the tokenizer is there")
    tokenizer = Tokenizer(shared)
    if tokenizer.vocab_size != config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size}: {str(shared)!r} has "
            f"{tokenizer.vocab_size} pieces; give that number, or a new path as data.tokenizer"
        )
    if copy.exists() and copy.read_bytes() != tokenizer.proto:
        raise UserError(
            f"{str(shared)!r} is not the tokenizer of the run, {str(copy)!r}; restore that one"
        )
    if hosts.is_first() and not copy.exists():
        write_whole(copy, tokenizer.proto)
    return tokenizer


def _check_packed(
    config: ml_collections.ConfigDict, rows: PackedRows, tokenizer: pathlib.Path
) -> None:
    """Raises `UserError` unless a packed corpus has rows of the context, of this tokenizer."""
    corpus = config.data.train
    if rows.length != config.model.context:
        raise UserError(
            f"model.context={config.model.context}: {corpus!r} has rows of {rows.length} tokens; "
            "pack it again with that --length, or change the model"
        )
    if not tokenizer.exists() or digest(tokenizer.read_bytes()) != rows.tokenizer_digest:
        absent = "" if tokenizer.exists() else "there, and should be "
        packed_with = pathlib.Path(corpus.removeprefix(PACKED_PREFIX)) / TOKENIZER
        raise UserError(
            f"{str(tokenizer)!r} is not {absent}the tokenizer that {corpus!r} was packed with; "
            f"give data.tokenizer={str(packed_with)!r}"
        )


def open_rows(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    corpus: Sentences | PackedRows,
    tokenizer: Tokenizer,
) -> PackedRows:
    """Returns the rows to train on: a packed corpus, or text, packed into the workdir."""
    if isinstance(corpus, PackedRows):
        return corpus
    folder = workdir / PACKED
    pack_once(folder, lambda: pack(corpus, tokenizer, folder, config.model.context, processes=0))
    return open_packed(folder)


def pack_once(folder: pathlib.Path, write: Callable[[], Any]) -> None:
    """Calls `write` in the first process, to pack text into `folder`. The others wait.

    Raises:
      UserError: this process does not see the folder.
    """
    if hosts.is_first():
        write()
    hosts.wait_for_all(f"{folder.name} is packed")
    if not (folder / INDEX).exists():
        raise UserError(
            f"{str(folder)!r} is not there, and the first process has packed the text in it; give "
            "a --workdir that all processes share"
        )
