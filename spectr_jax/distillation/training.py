"""Trains a student on its teacher's labels: the student, its steps, and its held-out scores."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.data.batches import Batches
from spectr_jax.distillation import losses
from spectr_jax.distillation.config import distil_config
from spectr_jax.distillation.labels import LabelledRows, batch_of, check_features, open_labels
from spectr_jax.distillation.online import OnlineRows, tokens_by_count
from spectr_jax.distillation.programs import make_programs
from spectr_jax.distillation.students import build, set_head, start_from_embedding, tokens_by_mass
from spectr_jax.loading.by_name import check_dtype, load
from spectr_jax.models.base import features_shown
from spectr_jax.models.formats import runs
from spectr_jax.models.formats.published import weights_path
from spectr_jax.models.formats.weights import load_weights
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.training import preparation
from spectr_jax.training.loop import explained, run
from spectr_jax.training.metrics import Curves
from spectr_jax.training.step import TrainState
from spectr_jax.utils import hosts, sharding
from spectr_jax.utils.config import check_positive
from spectr_jax.utils.errors import UserError, unknown
from spectr_jax.utils.files import digest

Source = LabelledRows | OnlineRows
"""What a student learns from."""


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
    preparation.check_workdir(config, workdir, distil_config())
    mesh = sharding.make_mesh(config.mesh.fsdp)
    source = _source(config, workdir)
    preparation.check_batch_size(config, jax.device_count())
    heldout = source.heldout(config)
    if len(heldout) < len(config.data.heldout):
        raise UserError(
            f"data.heldout={tuple(config.data.heldout)}: has two folders of one name; rename one"
        )
    digests = {"data.heldout": [digest(rows.tobytes())[:16] for rows in heldout.values()]}
    with explained(workdir), preparation.locked(workdir):
        preparation.check_workdir(config, workdir, distil_config())  # Another run may have begun.
        preparation.check_inputs(config, workdir, source.digests() | digests)
        data = source.batches(config, workdir)
        student = _student(config, workdir, source, data)
        programs = make_programs(
            config, mesh, student.shape, student.head_tokens, source.length, source.frozen
        )
        return run(
            config,
            workdir,
            mesh,
            programs,
            data,
            initial=functools.partial(_initial_params, config, student, source),
            score=lambda params: _scores(config, mesh, heldout, programs.evaluate, params),
            metric=runs.REJECTION,
            curves=Curves("alpha_1", f"eval_alpha_1_{next(iter(heldout))}", "alpha_1"),
        )


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
    config: ml_collections.ConfigDict, workdir: pathlib.Path, source: Source, data: Batches
) -> runs.Student:
    """Returns the run's student. It is chosen before the first step and stored in the workdir."""
    # A start that stopped before the run wrote its config may choose another student.
    if hosts.is_first() and not (workdir / runs.CONFIG).exists():
        shape = student_config(config.model, source.vocab_size, source.context)
        count = shape.head_tokens or source.vocab_size
        if config.init and shape.head_tokens:
            # A given head keeps its tokens, whatever tokens these labels prefer.
            tokens = np.asarray(_initial_student(config, shape, source).head.tokens[...])
        elif isinstance(source, OnlineRows):
            tokens = tokens_by_count(data, source.vocab_size, count)
        else:
            tokens = tokens_by_mass(source, count)
        student = runs.Student(shape, tokens, source.vocabulary, source.counts)
        runs.write_student(workdir, student, config.teacher or source.teacher_name)
    hosts.wait_for_all("the student's shape is there")
    student = runs.read_student(workdir)
    if student.vocabulary != source.vocabulary:
        raise UserError(
            f"--workdir={workdir}: has the student of another teacher than that of the labels; "
            "choose a new one"
        )
    return student


def _source(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> Source:
    """Returns the labels of the run, or the text that its teacher labels, with the counts at the
    start of the run, so that later additions do not change it."""
    resumes = (workdir / runs.CONFIG).exists()
    counts = runs.read_student(workdir).counts if resumes else ()
    if resumes and not counts and hosts.is_first():
        print(
            f"{workdir / runs.STUDENT} is older, and does not say how many rows the run began with: "
            "it continues on all that are there now"
        )
    source: Source
    if not config.online:
        source = open_labels(config.data.train, counts)
        if not source.labelled:
            raise UserError(
                f"data.train={config.data.train!r}: must have labels, which `label --labels=false` "
                "leaves out; label again, or set online=True"
            )
    elif not config.teacher:
        raise UserError("teacher='': must name the model that labels text; give --config.teacher")
    else:
        source = OnlineRows(config, load(config.teacher, config.teacher_dtype), counts)
    check_features(config, config.data.train, source.features)
    return source


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
    config: ml_collections.ConfigDict, student: runs.Student, source: Source
) -> nnx.State:
    """Returns the initial parameters: those of `config.init`, or random ones with the teacher's
    embedding and, if the student sees features, its head."""
    shape = student.shape
    if config.init:
        return nnx.state(_initial_student(config, shape, source), nnx.Param)
    name = config.teacher or source.teacher_name
    teacher = load(name, "float32")
    fits = shape.features in (0, features_shown(teacher.model))
    if teacher.tokenizer.vocabulary != source.vocabulary or not fits:
        raise UserError(
            f"teacher={name!r}: is not the one that made the labels in {config.data.train!r}, "
            f"{source.teacher_name!r}; give that, or leave it out"
        )
    model = build(shape, student.head_tokens, nnx.Rngs(config.seed))
    embed, head = (getattr(teacher.model, part, None) for part in ("embed", "head"))
    if isinstance(embed, nnx.Embed):
        table = jnp.asarray(embed.embedding[...], jnp.float32)
        start_from_embedding(model, table)
        if shape.features:
            untied = head.kernel[...].T if isinstance(head, nnx.Linear) else table
            set_head(model, jnp.asarray(untied, jnp.float32))
    elif hosts.is_first():
        print(f"{teacher.name!r} has no embedding to start from: the student's is random")
    return nnx.state(model, nnx.Param)


def _initial_student(
    config: ml_collections.ConfigDict, shape: LlamaConfig, source: Source
) -> Llama:
    """Returns the student that `config.init` names. If it sees only the last hidden state, it is
    extended to `feature_layers`, with the same outputs: the new projection is zero."""
    model, vocabulary = load_weights(weights_path(config.init))
    if vocabulary != source.vocabulary or not isinstance(model, Llama):
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
