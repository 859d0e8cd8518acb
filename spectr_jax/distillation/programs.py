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
from spectr_jax.training.optimizer import make_optimizer
from spectr_jax.training.programs import Programs, compiled
from spectr_jax.training.step import update
from spectr_jax.training.throughput import flops_per_token

DRAFTS = 4
"""Number of drafts of the second reported acceptance, alpha_4."""


def make_programs(
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    shape: LlamaConfig,
    head_tokens: np.ndarray,
    length: int,
    teacher: Frozen | None = None,
) -> Programs:
    """Returns the programs of a student's run on rows of `length` tokens. With a `teacher`, they
    label each batch first. The student's head scores `head_tokens`."""
    graphdef, state = abstract(shape)
    constants = nnx.filter_state(state, nnx.Not(nnx.Param))  # The tokens of the head.
    constants = jax.tree.map(lambda _: jnp.asarray(head_tokens), constants)
    output_of = np.full(shape.vocab_size, -1, np.int32)
    output_of[head_tokens] = np.arange(len(head_tokens))
    inputs_of = functools.partial(loss_inputs, output_of=jnp.asarray(output_of), depth=config.depth)
    optimizer, schedule = make_optimizer(config.optimizer, config.steps)
    # None for a student without features, () for one that sees the last hidden state alone.
    feature_layers = shape.feature_layers if shape.features else None
    # Training labels all tokens of a small head, which is exact and needs no sort of the vocabulary;
    # on a GPU the sort takes longer than the teacher. Held-out scores use labels as on disk.
    labelled_tokens = jnp.asarray(head_tokens) if shape.head_tokens else None

    def objective(params, part, key):
        del key  # No dropout.
        real, places = inputs_of(nnx.merge(graphdef, params, constants), part)

        def sum_over_places(function):
            at_each = jax.vmap(jax.vmap(jax.vmap(function)))
            return jnp.sum(real * at_each(places), axis=(1, 2))

        divergence = sum_over_places(losses.LOSSES[config.loss])
        accepted = jax.lax.stop_gradient(sum_over_places(losses.acceptance))
        text = sum_over_places(losses.cross_entropy) if config.cross_entropy else 0.0
        minimised = jnp.mean(divergence + config.cross_entropy * text)
        return minimised, {"loss": divergence[0], "alpha_1": accepted[0]}

    def step(state, batch, teacher=None):
        if teacher:
            batch = with_labels(teacher, batch, feature_layers, labelled_tokens)
        return update(objective, optimizer, config.accumulate, state, batch)

    def evaluate(params, batch, teacher=None):
        if teacher:
            batch = with_labels(teacher, batch, feature_layers)
        return summed_scores(*inputs_of(nnx.merge(graphdef, params, constants), batch), batch)

    depth = config.depth if shape.features else 1
    return compiled(
        mesh,
        build=lambda rngs: students.build(shape, head_tokens, rngs),
        optimizer=optimizer,
        step=step,
        evaluate=evaluate,
        schedule=schedule,
        flops_per_token=depth * flops_per_token(shape, students.parameters(shape), length),
        teacher=teacher,
    )


def loss_inputs(
    student: Llama, batch: dict[str, jax.Array], output_of: jax.Array, depth: int
) -> tuple[jax.Array, losses.Place]:
    """Returns which places [S, B, N] of a labelled batch are real, and what losses see there.

    The student's softmax is over the tokens that its head scores. A batch without `top` has labels
    of all of these. S is the number of levels (`students.levels`).

    Args:
      student: the student.
      batch: as `labels.batch_of` or `teacher.with_labels` returns.
      output_of: int32 [V], the output of the head that scores each token, or -1.
      depth: number of levels.
    """
    hidden = students.levels(student, batch, depth)
    head = student.head.linear if student.config.head_tokens else student.head
    log_p = jax.nn.log_softmax(head(hidden).astype(jnp.float32))
    depths = jnp.arange(len(hidden))[:, None, None]

    def log_p_of(tokens):
        columns = jnp.where(tokens < 0, -1, output_of[tokens])
        columns = jnp.broadcast_to(columns, (len(hidden), *columns.shape))
        scores = jnp.take_along_axis(log_p, jnp.maximum(columns, 0), axis=-1)
        return jnp.where(columns < 0, -jnp.inf, scores)

    log_q = batch["log_probabilities"]
    log_q = jnp.broadcast_to(log_q, (len(hidden), *log_q.shape))
    real = (batch["segments"] > 0) & (batch["positions"] >= depths)
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

    def sum_over_places(function):
        # One row at a time, because `optimal_acceptance` sorts.
        at_each = jax.lax.map(lambda level: jax.lax.map(jax.vmap(function), level), places)
        return jnp.sum(real * at_each, axis=(1, 2))

    optimum = functools.partial(losses.optimal_acceptance, drafts=DRAFTS)
    return {
        "kl": sum_over_places(losses.kl),
        "alpha_1": sum_over_places(losses.acceptance),
        f"alpha_{DRAFTS}": sum_over_places(optimum),
        "tokens": jnp.sum(real, axis=(1, 2)),
    }
