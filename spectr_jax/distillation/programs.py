"""The compiled programs of a student's run, and what its losses and scores see."""

import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from spectr_jax.distillation import losses, students
from spectr_jax.distillation.teacher import with_labels
from spectr_jax.models.frozen import Frozen
from spectr_jax.models.llama import Llama, LlamaConfig, abstract
from spectr_jax.training.optimizer import learning_rate, make_optimizer
from spectr_jax.training.programs import Programs, compiled
from spectr_jax.training.step import update

DRAFTS = 4
"""Number of drafts of the second reported acceptance, alpha_4."""


def make_programs(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    shape: LlamaConfig,
    tokens: np.ndarray,
    length: int,
    teacher: Frozen | None = None,
) -> Programs:
    """Returns the programs of a student's run on rows of `length` tokens. With a `teacher`, they
    label each batch first. The student's head scores `tokens`."""
    graphdef, state = abstract(shape)
    rest = nnx.filter_state(state, nnx.Not(nnx.Param))  # The tokens of the head.
    rest = jax.tree.map(lambda _: jnp.asarray(tokens), rest)
    outputs = np.full(shape.vocab_size, -1, np.int32)
    outputs[tokens] = np.arange(len(tokens))
    inputs_of = functools.partial(loss_inputs, outputs=jnp.asarray(outputs), depth=config.depth)
    schedule = learning_rate(config.optimizer, config.steps)
    optimizer = make_optimizer(config.optimizer, schedule)
    layers = shape.feature_layers if shape.features else None
    # Training labels all tokens of a small head, which is exact and needs no sort of the vocabulary;
    # on a GPU the sort takes longer than the teacher. Held-out scores use labels as on disk.
    head_tokens = jnp.asarray(tokens) if shape.head_tokens else None

    def objective(params, part, key):
        del key  # No dropout.
        real, places = inputs_of(nnx.merge(graphdef, params, rest), part)

        def total(function):
            at_each = jax.vmap(jax.vmap(jax.vmap(function)))
            return jnp.sum(real * at_each(places), axis=(1, 2))

        divergence = total(losses.LOSSES[config.loss])
        accepted = jax.lax.stop_gradient(total(losses.acceptance))
        text = total(losses.cross_entropy) if config.cross_entropy else 0.0
        loss = jnp.mean(divergence + config.cross_entropy * text)
        return loss, {"loss": divergence[0], "alpha_1": accepted[0]}

    def step(state, batch, teacher=None):
        labelled = with_labels(teacher, batch, layers, head_tokens) if teacher else batch
        return update(objective, optimizer, config.accumulate, state, labelled)

    def evaluate(params, batch, teacher=None):
        labelled = with_labels(teacher, batch, layers) if teacher else batch
        return summed_scores(*inputs_of(nnx.merge(graphdef, params, rest), labelled), labelled)

    levels = config.depth if shape.features else 1
    flops = 6 * students.parameters(shape) + 12 * shape.layers * shape.width * length
    return compiled(
        mesh,
        build=lambda rngs: students.build(shape, tokens, rngs),
        optimizer=optimizer,
        step=step,
        evaluate=evaluate,
        schedule=schedule,
        flops_per_token=levels * flops,
        teacher=teacher,
    )


def loss_inputs(
    student: Llama, batch: dict[str, jax.Array], outputs: jax.Array, depth: int
) -> tuple[jax.Array, losses.Place]:
    """Returns which places [S, B, N] of a labelled batch are real, and what losses see there.

    The student's softmax is over the tokens that its head scores. A batch without `top` has labels
    of all of these. S is the number of levels (`students.levels`).

    Args:
      student: the student.
      batch: as `labels.batch_of` or `teacher.with_labels` returns.
      outputs: int32 [V], the output of the head that scores each token, or -1.
      depth: number of levels.
    """
    hidden = students.levels(student, batch, depth)
    head = student.head.linear if student.config.head_tokens else student.head
    log_p = jax.nn.log_softmax(head(hidden).astype(jnp.float32))
    levels = jnp.arange(len(hidden))[:, None, None]

    def log_p_of(tokens):
        columns = jnp.where(tokens < 0, -1, outputs[tokens])
        columns = jnp.broadcast_to(columns, (len(hidden), *columns.shape))
        scores = jnp.take_along_axis(log_p, jnp.maximum(columns, 0), axis=-1)
        return jnp.where(columns < 0, -jnp.inf, scores)

    log_q = batch["log_probabilities"]
    log_q = jnp.broadcast_to(log_q, (len(hidden), *log_q.shape))
    real = (batch["segments"] > 0) & (batch["positions"] >= levels)
    log_target = log_p_of(batch["targets"][..., None])[..., 0]
    if "top" in batch:
        return real, losses.Place(log_p_of(batch["top"]), log_q, log_target)
    rest = jnp.zeros_like(log_target)  # The head scores no token without a label.
    return real, losses.Place(log_p, log_q, log_target, rest)


def summed_scores(
    real: jax.Array, places: losses.Place, batch: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns sums [S] over the tokens of a batch: KL(q, p), alpha_1, alpha_4 of the exact plan,
    and the number of tokens.

    Only tokens after which a draft is requested count. At level s the path must also start at such
    a token. `real` and `places` are the `loss_inputs` of the batch.
    """
    drafted = batch["drafted"]
    real &= drafted & jnp.stack([jnp.roll(drafted, level, axis=1) for level in range(len(real))])

    def total(function):
        # One row at a time, because `optimal_acceptance` sorts.
        at_each = jax.lax.map(lambda level: jax.lax.map(jax.vmap(function), level), places)
        return jnp.sum(real * at_each, axis=(1, 2))

    optimum = functools.partial(losses.optimal_acceptance, drafts=DRAFTS)
    return {
        "kl": total(losses.kl),
        "alpha_1": total(losses.acceptance),
        f"alpha_{DRAFTS}": total(optimum),
        "tokens": jnp.sum(real, axis=(1, 2)),
    }
