"""Trains a student on its teacher's labels: the student, its steps, and its held-out scores."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.data import batches
from spectr_jax.distillation import losses
from spectr_jax.distillation.config import distil_config
from spectr_jax.distillation.labels import LabelledRows, batch_of, check_teacher, open_labels
from spectr_jax.distillation.online import OnlineRows
from spectr_jax.distillation.programs import make_programs
from spectr_jax.distillation.students import build, frequent_tokens, set_head, start_from_embedding
from spectr_jax.loading.by_name import check_dtype, load, weights_path
from spectr_jax.models.base import features_shown
from spectr_jax.models.formats import runs
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.weights import load_weights
from spectr_jax.training import preparation
from spectr_jax.training.loop import explained, run
from spectr_jax.training.metrics import Curves
from spectr_jax.training.step import TrainState
from spectr_jax.utils import hosts, sharding
from spectr_jax.utils.config import check_positive
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import digest


def distil(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> TrainState:
    """Trains a student until `config.steps`, like `training.loop.train` and in the same kind of
    workdir.

    In addition to the files of a training run it writes student.json: the student's shape, the
    tokens that its head scores, and the teacher's vocabulary.

    Raises:
      UserError: the config, labels or teacher are invalid, or training cannot continue.
      Interrupted: after Ctrl-C or SIGTERM, once the run is saved.
    """
    check_distil_config(config)
    preparation.claim_workdir(config, workdir, distil_config())
    mesh = sharding.make_mesh(config.mesh.fsdp)
    streams = preparation.count_streams(config, jax.device_count(), jax.process_count())
    rows = _rows(config, workdir)
    heldout = _heldout(config, rows)
    if isinstance(rows, OnlineRows):
        streams = rows.streams(streams)
    elif len(rows) < streams:
        raise UserError(
            f"data.train={config.data.train!r}: has {len(rows)} labelled rows, too few for "
            f"{streams} streams; label more, or lower data.streams"
        )
    learnt = rows.digests() if isinstance(rows, OnlineRows) else {"data.train": rows.digest()}
    scored = [digest(labelled.tobytes())[:16] for labelled in heldout.values()]
    with explained(workdir), preparation.locked(workdir):
        preparation.check_inputs(config, workdir, {**learnt, "data.heldout": scored})
        student = _student(config, workdir, rows)
        shape, tokens = student.shape, student.head_tokens
        teacher = rows.model if isinstance(rows, OnlineRows) else None
        programs = make_programs(config, mesh, shape, tokens, rows.length, teacher)
        return run(
            config,
            workdir,
            mesh,
            programs,
            iter(_batches(config, rows, streams)),
            initial=functools.partial(_initial_params, config, shape, tokens, rows),
            score=lambda params: _scores(config, mesh, heldout, programs.evaluate, params),
            metric=runs.REJECTION,
            curves=Curves("alpha_1", f"eval_alpha_1_{next(iter(heldout))}", "alpha_1"),
        )


def _batches(
    config: ml_collections.ConfigDict, rows: LabelledRows | OnlineRows, streams: int
) -> grain.IterDataset:
    place = jax.process_index(), jax.process_count()
    if isinstance(rows, OnlineRows):
        return rows.batches(config.seed, streams, *place)
    return batches.row_batches(rows, batch_of, config.batch_size, config.seed, streams, *place)


def check_distil_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    preparation.check_shared(config, distil_config())
    check_positive(
        config, "depth", "data.heldout_rows", "data.length", "data.shares", "model.kv_heads"
    )
    if config.data.length < 2:
        raise UserError(
            f"data.length={config.data.length}: must be at least 2, because a token is learnt from "
            "those before it"
        )
    if config.loss not in losses.LOSSES:
        raise unknown("loss", config.loss, losses.LOSSES)
    model = config.model
    not_negative = {f"model.{name}": model[name] for name in ("head_tokens", "embed_rank")}
    for name, value in {"cross_entropy": config.cross_entropy, **not_negative}.items():
        if not value >= 0:
            raise UserError(f"{name}={value}: must not be negative; give at least 0")
    if model.feature_layers and not config.online:
        raise UserError(
            f"model.feature_layers={tuple(model.feature_layers)}: labels on disk have no features "
            "of lower layers; set online=True"
        )
    check_dtype(config.teacher_dtype)


def student_config(model: ml_collections.ConfigDict, vocab_size: int, context: int) -> LlamaConfig:
    """Returns the shape of a student for a teacher's vocabulary and context."""
    return LlamaConfig(
        **model, head_width=model.width // model.heads, vocab_size=vocab_size, context=context
    )


def _student(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, rows: LabelledRows | OnlineRows
) -> runs.Student:
    """Returns the run's student. It is chosen before the first step and stored in the workdir."""
    # A start that stopped before the run wrote its config may choose another student.
    if hosts.is_first() and not (workdir / runs.CONFIG).exists():
        shape = student_config(config.model, rows.vocab_size, rows.context)
        count = shape.head_tokens or rows.vocab_size
        if config.init and shape.head_tokens:
            # A given head keeps its tokens, whatever tokens these labels prefer.
            tokens = np.asarray(_initial_student(config, shape, rows).head.tokens[...])
        elif isinstance(rows, OnlineRows):
            tokens = rows.frequent_tokens(count, config.seed)
        else:
            tokens = frequent_tokens(rows, count)
        student = runs.Student(shape, tokens, rows.vocabulary, rows.counts)
        runs.write_student(workdir, student, _teacher(config, rows))
    hosts.wait_for_all("the student's shape is there")
    student = runs.read_student(workdir)
    if student.vocabulary != rows.vocabulary:
        raise UserError(
            f"--workdir={workdir}: has the student of another teacher than that of the labels; "
            "choose a new one"
        )
    return student


def _rows(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> LabelledRows | OnlineRows:
    """Returns the labels of the run, or the text that its teacher labels, with the counts at the
    start of the run, so that later additions do not change it."""
    counts = runs.read_student(workdir).rows if (workdir / runs.CONFIG).exists() else ()
    if not config.online:
        rows = open_labels(config.data.train, counts)
        if not rows.labelled:
            raise UserError(
                f"data.train={config.data.train!r}: must have labels, which `label --labels=false` "
                "leaves out; label again, or set online=True"
            )
        return rows
    if not config.teacher:
        raise UserError("teacher='': must name the model that labels text; give --config.teacher")
    return OnlineRows(config, load(config.teacher, config.teacher_dtype), counts)


def _heldout(
    config: ml_collections.ConfigDict, rows: LabelledRows | OnlineRows
) -> dict[str, np.ndarray]:
    """Returns the first `data.heldout_rows` rows of each held-out set, by the last part of its path,
    after checking that they suit `rows` and the student."""
    opened: dict[str, LabelledRows] = {}
    if isinstance(rows, OnlineRows):
        heldout = rows.heldout()
    else:
        opened = {name: open_labels(name) for name in config.data.heldout}
        heldout = {
            pathlib.Path(name).name: labelled.first(config.data.heldout_rows)
            for name, labelled in opened.items()
        }
    if len(heldout) < len(config.data.heldout):
        raise UserError(
            f"data.heldout={tuple(config.data.heldout)}: has two folders of one name; rename one"
        )
    for name, others in opened.items():
        if (others.vocabulary, others.vocab_size) != (rows.vocabulary, rows.vocab_size):
            raise UserError(
                f"data.heldout={name!r}: has labels of another teacher than {config.data.train!r}; "
                "label them again"
            )
        check_teacher(name, others.teacher, config.data.train, rows.teacher)
    every: dict[str, LabelledRows | OnlineRows] = {config.data.train: rows, **opened}
    for name, source in every.items():
        if config.model.features not in (0, source.features):
            fix = "set it, and model.width, to that" if source.features else "label with --features"
            raise UserError(
                f"model.features={config.model.features}: {name!r} has {source.features} features "
                f"per token; {fix}"
            )
    return heldout


def _scores(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    heldout: dict[str, np.ndarray],
    evaluate: Callable,
    params: Any,
) -> dict[str, float]:
    """Returns means over the held-out tokens of each set, by name, and the rejection on the first
    set."""
    scores: dict[str, float] = {}
    size = config.batch_size // config.accumulate
    for name, rows in heldout.items():
        sums: dict[str, Any] = {}
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            padded = np.concatenate([part, np.zeros(size - len(part), part.dtype)])
            batch = sharding.put_rows(mesh, batch_of(padded[hosts.own_share(size)]))
            for key, value in evaluate(params, batch).items():
                sums[key] = sums.get(key, 0.0) + np.asarray(value)
        tokens = sums.pop("tokens")
        means = {key: value / np.maximum(tokens, 1) for key, value in sums.items()}
        if not scores:
            scores[runs.REJECTION] = 1 - float(means["alpha_1"][0])
        for key, values in means.items():
            scores[f"eval_{key}_{name}"] = float(values[0])
            for level in range(1, len(values)):
                if tokens[level]:  # No sequence may reach this level.
                    scores[f"eval_{key}_{name}_level_{level + 1}"] = float(values[level])
    return scores


def _initial_params(
    config: ml_collections.ConfigDict,
    shape: LlamaConfig,
    tokens: np.ndarray,
    rows: LabelledRows | OnlineRows,
) -> nnx.State:
    """Returns the initial parameters: those of `config.init`, or random ones with the teacher's
    embedding and, if the student sees features, its head."""
    if config.init:
        return nnx.state(_initial_student(config, shape, rows), nnx.Param)
    name = _teacher(config, rows)
    teacher = load(name, "float32")
    fits = shape.features in (0, features_shown(teacher.model))
    if teacher.tokenizer.vocabulary != rows.vocabulary or not fits:
        raise UserError(
            f"teacher={name!r}: is not the one that made the labels in {config.data.train!r}, "
            f"{rows.teacher.name or 'an older one'!r}; give that, or leave it out"
        )
    student = build(shape, tokens, nnx.Rngs(config.seed))
    embed, head = (getattr(teacher.model, part, None) for part in ("embed", "head"))
    if isinstance(embed, nnx.Embed):
        table = jnp.asarray(embed.embedding[...], jnp.float32)
        start_from_embedding(student, table)
        if shape.features:
            untied = head.kernel[...].T if isinstance(head, nnx.Linear) else table
            set_head(student, jnp.asarray(untied, jnp.float32))
    elif hosts.is_first():
        print(f"{teacher.name!r} has no embedding to start from: the student's is random")
    return nnx.state(student, nnx.Param)


def _teacher(config: ml_collections.ConfigDict, rows: LabelledRows | OnlineRows) -> str:
    """Returns the teacher's name from the config, or else from the labels."""
    name = config.teacher or rows.teacher.name
    if not name:
        raise UserError(
            f"teacher='': the labels in {config.data.train!r} do not name theirs; give "
            "--config.teacher"
        )
    return name


def _initial_student(
    config: ml_collections.ConfigDict, shape: LlamaConfig, rows: LabelledRows | OnlineRows
) -> Llama:
    """Returns the student that `config.init` names. If it sees only the last hidden state, it is
    extended to `feature_layers`, with the same outputs: the new projection is zero."""
    model, vocabulary = load_weights(weights_path(config.init))
    if vocabulary != rows.vocabulary or not isinstance(model, Llama):
        raise UserError(
            f"init={config.init!r}: is not an exported student of this vocabulary; give one that is"
        )
    if shape.feature_layers and not model.config.feature_layers and model.config.features:
        wider = dataclasses.replace(model.config, feature_layers=shape.feature_layers)
        narrow, model = model, Llama(wider, rngs=nnx.Rngs(0))
        nnx.update(model, nnx.state(narrow))
    theirs, ours = dataclasses.asdict(model.config), dataclasses.asdict(shape)
    for name in theirs:
        if name != "dtype" and theirs[name] != ours[name]:
            raise UserError(
                f"init={config.init!r}: has {name}={theirs[name]!r}, the config has "
                f"{ours[name]!r}; take the config of its size, or leave init out"
            )
    return model
