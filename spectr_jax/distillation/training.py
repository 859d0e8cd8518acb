"""Trains a student on its teacher's labels: the student, its steps, and its held-out scores."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from spectr_jax.data import batches
from spectr_jax.data.packed import PackedRows
from spectr_jax.distillation import losses
from spectr_jax.distillation.config import distil_config
from spectr_jax.distillation.labels import LabelledRows, batch_of, check_teacher, open_labels
from spectr_jax.distillation.online import Lessons
from spectr_jax.distillation.programs import make_programs
from spectr_jax.distillation.students import (
    begin_as_teacher,
    build,
    frequent_tokens,
    parameters,
    share_head,
    widened,
)
from spectr_jax.loading.by_name import Trained, check_dtype, load, weights_path
from spectr_jax.models.base import features_shown
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.weights import load_weights
from spectr_jax.training import preparation, runs
from spectr_jax.training.loop import Task, explained, run
from spectr_jax.training.metrics import Curves
from spectr_jax.training.step import TrainState
from spectr_jax.utils import hosts, sharding
from spectr_jax.utils.config import check_fields, check_positive
from spectr_jax.utils.errors import UserError, unknown


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
    if isinstance(rows, Lessons):
        streams = rows.streams(streams)
    elif len(rows) < streams:
        raise UserError(
            f"{len(rows)} labelled rows are too few for {streams} streams; label more, or lower "
            "data.streams"
        )
    with explained(workdir), preparation.locked(workdir):
        student = _student(config, workdir, rows)
        shape, tokens = student.shape, student.head_tokens
        programs = make_programs(
            config, mesh, shape, tokens, rows.model if isinstance(rows, Lessons) else None
        )
        levels = config.depth if shape.features else 1
        task = Task(
            programs=programs,
            data=iter(_batches(config, rows, streams)),
            evaluate=functools.partial(_scores, programs.evaluate, mesh, config, heldout),
            metric=runs.REJECTION,
            curves=Curves("alpha_1", f"eval_alpha_1_{next(iter(heldout))}", "alpha_1"),
            flops_per_token=levels
            * (6 * parameters(shape) + 12 * shape.layers * shape.width * rows.length),
            given=functools.partial(_given, config, shape, tokens, rows),
        )
        return run(config, workdir, mesh, task)


def _batches(
    config: ml_collections.ConfigDict, rows: LabelledRows | Lessons, streams: int
) -> grain.IterDataset:
    place = jax.process_index(), jax.process_count()
    if isinstance(rows, Lessons):
        return rows.batches(config.seed, streams, *place)
    return batches.row_batches(rows, batch_of, config.batch_size, config.seed, streams, *place)


def check_distil_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for an invalid config."""
    check_fields(config, distil_config())
    check_positive(
        config,
        "steps",
        "batch_size",
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep_checkpoints",
    )
    check_positive(config, "mesh.fsdp", "accumulate", "depth", "data.streams", "data.heldout_rows")
    check_positive(config, "data.length", "data.shares")
    check_positive(
        config, "model.layers", "model.width", "model.mlp", "model.heads", "model.kv_heads"
    )
    if config.loss not in losses.LOSSES:
        raise unknown("loss", config.loss, losses.LOSSES)
    if not config.cross_entropy >= 0:
        raise UserError(
            f"cross_entropy={config.cross_entropy} is negative; give a weight such as 0.1"
        )
    if config.model.dtype not in ("float32", "bfloat16"):
        raise UserError(
            f"model.dtype={config.model.dtype!r} is not known; give 'float32' or 'bfloat16'"
        )
    if config.model.width % (2 * config.model.heads):
        raise UserError(
            f"model.width={config.model.width} is not a multiple of 2 * "
            f"model.heads={config.model.heads}; change one"
        )
    for name in ("head_tokens", "embed_rank"):
        if config.model[name] < 0:
            raise UserError(f"model.{name}={config.model[name]} is negative; 0 is for all")
    check_dtype(config.teacher_dtype)
    preparation.check_optimizer(config)


def student_config(model: ml_collections.ConfigDict, vocab_size: int, context: int) -> LlamaConfig:
    """Returns the shape of a student for a teacher's vocabulary and context."""
    return LlamaConfig(
        **model, head_width=model.width // model.heads, vocab_size=vocab_size, context=context
    )


def _student(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, rows: LabelledRows | Lessons
) -> runs.Student:
    """Returns the run's student. It is chosen before the first step and stored in the workdir."""
    if (
        hosts.is_first() and not (workdir / runs.CONFIG).exists()
    ):  # A start that got no further does not bind.
        shape = student_config(config.model, rows.vocab_size, rows.context)
        if (
            config.init and shape.head_tokens
        ):  # The given head already has its tokens, whatever tokens these labels prefer.
            tokens = np.asarray(_begun(config, shape, rows).head.tokens[...])
        elif isinstance(rows, Lessons):
            tokens = rows.frequent_tokens(shape.head_tokens or rows.vocab_size, config.seed)
        else:
            tokens = frequent_tokens(rows, shape.head_tokens or rows.vocab_size)
        runs.write_student(
            workdir,
            runs.Student(shape, tokens, rows.vocabulary, rows.counts),
            _teacher(config, rows),
        )
    hosts.wait_for_all("the student's shape is there")
    student = runs.read_student(workdir)
    if student.vocabulary != rows.vocabulary:
        raise UserError(
            f"{str(workdir)!r} has the student of another teacher than the labels'; choose a new "
            "--workdir"
        )
    return student


def _rows(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> LabelledRows | Lessons:
    """Returns the labels of the run, or the text that its teacher labels, with the counts at the
    start of the run, so that later additions do not change it."""
    counts = runs.read_student(workdir).rows if (workdir / runs.CONFIG).exists() else ()
    if not config.online:
        rows = open_labels(config.data.train, counts)
        if not rows.labelled:
            raise UserError(
                f"data.train={config.data.train!r}: must have labels, which `label --labels=false` "
                "leaves out; label again, "
                "or set online=True"
            )
        return rows
    if not config.teacher:
        raise UserError(
            "teacher='': must be the name of a model, which labels text online; give "
            "--config.teacher"
        )
    return Lessons(config, load(config.teacher, config.teacher_dtype), counts)


def _heldout(
    config: ml_collections.ConfigDict, rows: LabelledRows | Lessons
) -> Mapping[str, PackedRows]:
    """Returns the held-out labels by the last part of their folders' names, after checking that
    they suit `rows` and the student."""
    opened: dict[str, LabelledRows] = {}
    heldout: Mapping[str, PackedRows]
    if isinstance(rows, Lessons):
        heldout = rows.heldout()
    else:
        opened = {name: open_labels(name) for name in config.data.heldout}
        heldout = {pathlib.Path(name).name: labelled for name, labelled in opened.items()}
    if len(heldout) < len(config.data.heldout):
        raise UserError(
            f"data.heldout={tuple(config.data.heldout)} has two folders of one name; rename one"
        )
    for name, others in opened.items():
        if (others.vocabulary, others.vocab_size) != (rows.vocabulary, rows.vocab_size):
            raise UserError(
                f"data.heldout has {name!r}, labels of another teacher than {config.data.train!r}; "
                "label them again"
            )
        check_teacher(name, others.teacher, config.data.train, rows.teacher)
    every: dict[str, LabelledRows | Lessons] = {config.data.train: rows, **opened}
    for name, each in every.items():
        if config.model.features and not each.features:
            raise UserError(
                f"labels {name!r} have no features for the student to see; label again with "
                "--features"
            )
        if config.model.features not in (0, each.features):
            raise UserError(
                f"model.features={config.model.features} is not the teacher's {each.features}, as "
                f"labels {name!r} have "
                "them; give that, as model.width too"
            )
    return heldout


def _scores(
    evaluate: Callable,
    mesh,
    config: ml_collections.ConfigDict,
    heldout: Mapping[str, PackedRows],
    params: Any,
) -> dict[str, float]:
    """Returns means over the held-out tokens of each set, by name. Those of the first set are
    also returned without its name."""
    scores: dict[str, float] = {}
    size = config.batch_size // config.accumulate
    for name, rows in heldout.items():
        sums: dict[str, Any] = {}
        for first in range(0, min(len(rows), config.data.heldout_rows), size):
            taken = rows.take(
                np.arange(first, min(first + size, len(rows), config.data.heldout_rows))
            )
            padded = np.concatenate([taken, np.zeros(size - len(taken), taken.dtype)])
            mine = padded[hosts.own_share(size)]
            for key, value in evaluate(params, sharding.put_rows(mesh, batch_of(mine))).items():
                sums[key] = sums.get(key, 0.0) + np.asarray(value)
        means = {
            key: value / np.maximum(sums["tokens"], 1)
            for key, value in sums.items()
            if key != "tokens"
        }
        if not scores:
            scores = {runs.REJECTION: 1 - float(means["alpha_1"][0])}
        for key, value in means.items():
            scores[f"eval_{key}_{name}"] = float(value[0])
            there = value[1:][sums["tokens"][1:] > 0]  # No sequence may reach this level.
            scores |= {
                f"eval_{key}_{name}_level_{level}": float(v) for level, v in enumerate(there, 2)
            }
    return scores


def _given(
    config: ml_collections.ConfigDict,
    shape: LlamaConfig,
    tokens: np.ndarray,
    rows: LabelledRows | Lessons,
) -> nnx.State:
    """Returns the initial parameters: those of `config.init`, or random ones with the teacher's
    embedding."""
    if config.init:
        return nnx.state(_begun(config, shape, rows), nnx.Param)
    teacher = load(_teacher(config, rows), "float32")
    if teacher.tokenizer.vocabulary != rows.vocabulary or shape.features not in (
        0,
        features_shown(teacher.model),
    ):
        raise UserError(
            f"teacher={config.teacher!r} is not the one that made the labels in "
            f"{config.data.train!r}, "
            f"{rows.teacher.name or 'an older one'!r}; give that, or leave it out"
        )
    student, embedding = build(shape, tokens, nnx.Rngs(config.seed)), teacher_embedding(teacher)
    if embedding is None:
        if hosts.is_first():
            print(f"{teacher.name!r} has no embedding to begin with: the student's is random")
        return nnx.state(student, nnx.Param)
    begin_as_teacher(student, embedding)
    if shape.features:
        share_head(student, teacher_head(teacher, embedding))
    return nnx.state(student, nnx.Param)


def _teacher(config: ml_collections.ConfigDict, rows: LabelledRows | Lessons) -> str:
    """Returns the teacher's name from the config, or else from the labels."""
    if not config.teacher and not rows.teacher.name:
        raise UserError(
            f"the labels in {config.data.train!r} do not say who made them; give --config.teacher"
        )
    return config.teacher or rows.teacher.name


def _begun(
    config: ml_collections.ConfigDict, shape: LlamaConfig, rows: LabelledRows | Lessons
) -> Llama:
    """Returns the student that `config.init` names, extended to `feature_layers` if it sees only
    the last hidden state."""
    model, vocabulary = load_weights(weights_path(config.init))
    if vocabulary != rows.vocabulary or not isinstance(model, Llama):
        raise UserError(
            f"init={config.init!r} is not an exported student of this vocabulary; give one that is"
        )
    if shape.feature_layers and not model.config.feature_layers and model.config.features:
        model = widened(
            model, dataclasses.replace(model.config, feature_layers=shape.feature_layers)
        )
    theirs, ours = dataclasses.asdict(model.config), dataclasses.asdict(shape)
    for name in theirs:
        if name != "dtype" and theirs[name] != ours[name]:
            raise UserError(
                f"init={config.init!r} has {name}={theirs[name]!r}, the config has {ours[name]!r}; "
                "take the config of its "
                "size, or leave init out"
            )
    return model


def teacher_embedding(teacher: Trained) -> jax.Array | None:
    """Returns the embedding [V, E] of a teacher, or None if it has none."""
    embed = getattr(teacher.model, "embed", None)
    return jnp.asarray(embed.embedding[...], jnp.float32) if isinstance(embed, nnx.Embed) else None


def teacher_head(teacher: Trained, embedding: jax.Array) -> jax.Array:
    """Returns the head [V, E] of a teacher, or its embedding if the two are tied."""
    head = getattr(teacher.model, "head", None)
    return (
        jnp.asarray(head.kernel[...], jnp.float32).T if isinstance(head, nnx.Linear) else embedding
    )
