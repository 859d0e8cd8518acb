"""A student trained on its teacher's labels: what it is built of, its steps, and what it is scored by."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from spectr_jax import hosts, sharding
from spectr_jax.config import check_fields, check_positive, distil_config
from spectr_jax.data import batches
from spectr_jax.distillation import losses
from spectr_jax.distillation.labels import LabelledRows, batch_of, open_labels
from spectr_jax.distillation.students import begin_as_teacher, build, frequent_tokens, parameters
from spectr_jax.errors import UserError, unknown
from spectr_jax.files import expanded, write_json
from spectr_jax.loading import Trained, load
from spectr_jax.models.llama import Llama, LlamaConfig, abstract
from spectr_jax.models.transformer import causal
from spectr_jax.models.weights import load_weights
from spectr_jax.training import preparation
from spectr_jax.training.loop import Task, explained, run
from spectr_jax.training.optimizer import make_optimizer
from spectr_jax.training.programs import Programs, compiled
from spectr_jax.training.step import TrainState, update

STUDENT = "student.json"
METRIC = "eval_rejection"
"""1 - alpha_1 on the first held-out labels."""
DRAFTS = 4
"""alpha_4 is told beside alpha_1."""


def distil(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> TrainState:
    """Trains a student until `config.steps`; as `training.loop.train` does, and with the same workdir.

    Beside what a training run writes, student.json has the student's shape, the tokens that its head scores, and the
    teacher's vocabulary.

    Raises:
      UserError: a bad config, labels or teacher, or anything that stops a training run.
      Interrupted: Ctrl-C or SIGTERM, once all is saved.
    """
    check_distil_config(config)
    preparation.claim_workdir(config, workdir, distil_config())
    mesh = sharding.make_mesh(config.mesh.fsdp)
    streams = preparation.count_streams(config, jax.device_count(), jax.process_count())
    rows = open_labels(config.data.train)
    heldout = {pathlib.Path(name).name: open_labels(name) for name in config.data.heldout}
    if len(heldout) < len(config.data.heldout):
        raise UserError(f"data.heldout={tuple(config.data.heldout)} has two folders of one name; rename one")
    for name, others in heldout.items():
        if others.vocabulary != rows.vocabulary:
            raise UserError(f"held-out labels {name!r} are of another teacher than {config.data.train!r}; label them again")
    if len(rows) < streams:
        raise UserError(f"{len(rows)} labelled rows are too few for {streams} streams; label more, or lower data.streams")
    with explained(workdir), preparation.locked(workdir):
        shape, tokens = _student(config, workdir, rows)
        programs = make_programs(config, mesh, shape, tokens)
        task = Task(
            programs=programs,
            data=iter(
                batches.row_batches(
                    rows, batch_of, config.batch_size, config.seed, streams, jax.process_index(), jax.process_count()
                )
            ),
            evaluate=functools.partial(_scores, programs.evaluate, mesh, config, heldout),
            metric=METRIC,
            flops_per_token=6 * parameters(shape) + 12 * shape.layers * shape.width * rows.length,
            given=functools.partial(_given, config, shape, tokens, rows),
        )
        return run(config, workdir, mesh, task)


def check_distil_config(config: ml_collections.ConfigDict) -> None:
    """Raises `UserError` for a config that no run can use."""
    check_fields(config, distil_config())
    check_positive(config, "steps", "batch_size", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints")
    check_positive(config, "mesh.fsdp", "accumulate", "data.streams", "data.heldout_rows")
    check_positive(config, "model.layers", "model.width", "model.mlp", "model.heads", "model.kv_heads")
    if config.loss not in losses.LOSSES:
        raise unknown("loss", config.loss, losses.LOSSES)
    if not config.cross_entropy >= 0:
        raise UserError(f"cross_entropy={config.cross_entropy} is negative; give a weight such as 0.1")
    if config.model.dtype not in ("float32", "bfloat16"):
        raise UserError(f"model.dtype={config.model.dtype!r} is not known; give 'float32' or 'bfloat16'")
    if config.model.width % (2 * config.model.heads):
        raise UserError(f"model.width={config.model.width} is not a multiple of 2 * model.heads={config.model.heads}")
    for name in ("head_tokens", "embed_rank"):
        if config.model[name] < 0:
            raise UserError(f"model.{name}={config.model[name]} is negative; 0 is for all")
    preparation.check_optimizer(config)


def student_config(model: ml_collections.ConfigDict, vocab_size: int, context: int) -> LlamaConfig:
    """The shape of a student, for a teacher's vocabulary and context."""
    return LlamaConfig(**model, head_width=model.width // model.heads, vocab_size=vocab_size, context=context)


def _student(config: ml_collections.ConfigDict, workdir: pathlib.Path, rows: LabelledRows) -> tuple[LlamaConfig, np.ndarray]:
    """The shape of the run's student and the tokens that its head scores: chosen once, and kept in the workdir."""
    path = workdir / STUDENT
    if hosts.is_first() and not path.exists():
        shape = student_config(config.model, rows.vocab_size, rows.context)
        if config.init and shape.head_tokens:  # Its head knows its own tokens, whatever these labels have most of.
            tokens = np.asarray(_begun(config, shape, rows).head.tokens[...])
        else:
            tokens = frequent_tokens(rows, shape.head_tokens or rows.vocab_size)
        about = {"teacher": config.teacher, "vocabulary": rows.vocabulary, "model": dataclasses.asdict(shape)}
        write_json(path, {**about, "head_tokens": tokens.tolist()})
    hosts.wait_for_all("the student's shape is there")
    shape, tokens, vocabulary = read_student(workdir)
    if vocabulary != rows.vocabulary:
        raise UserError(f"{str(workdir)!r} has the student of another teacher than the labels'; choose a new --workdir")
    return shape, tokens


def read_student(workdir: pathlib.Path) -> tuple[LlamaConfig, np.ndarray, str]:
    """The shape of a run's student, the tokens that its head scores, and its vocabulary's digest.

    Raises:
      UserError: the file is not there, or damaged.
    """
    try:
        about = json.loads((workdir / STUDENT).read_text())
        return LlamaConfig(**about["model"]), np.array(about["head_tokens"], np.int32), about["vocabulary"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(workdir / STUDENT)!r} cannot be read ({error}); restore it, or train anew") from error


def make_programs(config: ml_collections.ConfigDict, mesh, shape: LlamaConfig, tokens: np.ndarray) -> Programs:
    """The programs of a student's run."""
    graphdef, state = abstract(shape)
    rest = nnx.filter_state(state, nnx.Not(nnx.Param))
    rest = jax.tree.map(lambda _: jnp.asarray(tokens), rest)
    number_of = np.full(shape.vocab_size, -1, np.int32)
    number_of[tokens] = np.arange(len(tokens))
    optimizer = make_optimizer(config.optimizer, config.steps)
    see = functools.partial(places, lambda params: nnx.merge(graphdef, params, rest), jnp.asarray(number_of))
    loss = losses.LOSSES[config.loss]

    def objective(params, part, key):
        del key  # No dropout.
        real = part["segments"] > 0
        seen = see(params, part)
        own = jnp.sum(real * jax.vmap(jax.vmap(loss))(seen))
        text = jnp.sum(real * jax.vmap(jax.vmap(losses.cross_entropy))(seen)) if config.cross_entropy else 0.0
        accepted = jnp.sum(real * jax.vmap(jax.vmap(losses.acceptance))(seen))
        return own + config.cross_entropy * text, {"loss": own, "alpha_1": jax.lax.stop_gradient(accepted)}

    return compiled(
        mesh,
        build=lambda rngs: build(shape, tokens, rngs),
        optimizer=optimizer,
        step=functools.partial(update, objective, optimizer, config.accumulate),
        evaluate=functools.partial(_sums, see),
    )


def places(model: Callable[[Any], Llama], number_of: jax.Array, params: Any, batch: dict[str, jax.Array]) -> losses.Place:
    """What the losses see at each place [B, N] of a batch; the student's softmax is over the tokens that its head scores."""
    student = model(params)
    hidden, _ = student.hidden(batch["inputs"], batch["positions"], causal(batch["segments"]))
    head = student.head.linear if student.config.head_tokens else student.head
    log_p = jax.nn.log_softmax(head(hidden).astype(jnp.float32))

    def of(tokens):
        numbers = jnp.where(tokens < 0, -1, number_of[tokens])
        found = jnp.take_along_axis(log_p, jnp.maximum(numbers, 0), axis=-1)
        return jnp.where(numbers < 0, -jnp.inf, found)

    return losses.Place(of(batch["top"]), batch["log_probabilities"], of(batch["targets"][..., None])[..., 0])


def _sums(see: Callable, params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums over the tokens of a batch: KL(q, p), alpha_1, alpha_4 of the exact plan, and how many there are."""
    real, seen = batch["segments"] > 0, see(params, batch)
    optimum = functools.partial(losses.optimal_acceptance, drafts=DRAFTS)
    found: dict[str, Callable] = {"nats": losses.kl, "alpha_1": losses.acceptance, f"alpha_{DRAFTS}": optimum}
    sums = {name: jnp.sum(real * jax.lax.map(jax.vmap(each), seen)) for name, each in found.items()}
    return {**sums, "tokens": jnp.sum(real)}


def _scores(
    evaluate: Callable, mesh, config: ml_collections.ConfigDict, heldout: dict[str, LabelledRows], params: Any
) -> dict[str, float]:
    """Means over the held-out tokens of each set, by name; those of the first set also without it."""
    scores: dict[str, float] = {}
    size = config.batch_size // config.accumulate
    share = size // jax.process_count()
    for name, rows in heldout.items():
        sums: dict[str, float] = {}
        for first in range(0, min(len(rows), config.data.heldout_rows), size):
            taken = rows.take(np.arange(first, min(first + size, len(rows), config.data.heldout_rows)))
            padded = np.concatenate([taken, np.zeros(size - len(taken), taken.dtype)])
            mine = padded[jax.process_index() * share :][:share]
            for key, value in evaluate(params, sharding.put_rows(mesh, batch_of(mine))).items():
                sums[key] = sums.get(key, 0.0) + float(value)
        means = {key: value / sums["tokens"] for key, value in sums.items() if key != "tokens"}
        if not scores:
            scores = {METRIC: 1 - means["alpha_1"], "eval_nats_per_token": means["nats"]}
        scores |= {f"eval_{key}_{name}": value for key, value in means.items()}
    return scores


def _given(config: ml_collections.ConfigDict, shape: LlamaConfig, tokens: np.ndarray, rows: LabelledRows) -> nnx.State:
    """What a student starts from: `config.init`, or its random weights with the teacher's embedding."""
    if config.init:
        return nnx.state(_begun(config, shape, rows), nnx.Param)
    table = teacher_embedding(load(config.teacher))
    student = build(shape, tokens, nnx.Rngs(config.seed))
    begin_as_teacher(student, table)
    return nnx.state(student, nnx.Param)


def _begun(config: ml_collections.ConfigDict, shape: LlamaConfig, rows: LabelledRows) -> Llama:
    """The student that `config.init` names."""
    model, vocabulary = load_weights(expanded(config.init))
    if vocabulary != rows.vocabulary or not isinstance(model, Llama):
        raise UserError(f"init={config.init!r} is no student of this vocabulary; give one that was exported")
    if dataclasses.replace(model.config, dtype=shape.dtype) != shape:
        raise UserError(f"init={config.init!r} has another shape, {model.config}; change config.model, or start anew")
    return model


def teacher_embedding(teacher: Trained) -> jax.Array:
    """The embedding [V, E] of a loaded teacher.

    Raises:
      UserError: it is no decoder that has one.
    """
    embed = getattr(teacher.model, "embed", None)
    if not isinstance(embed, nnx.Embed):
        raise UserError(f"teacher {teacher.name!r} has no embedding to begin with; give a decoder of ours or a Llama")
    return jnp.asarray(embed.embedding[...], jnp.float32)
