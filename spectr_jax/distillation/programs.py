"""The compiled programs of a student's run, and what its losses and scores see."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from flax import nnx

from spectr_jax.distillation import losses, students
from spectr_jax.distillation.students import build
from spectr_jax.distillation.teacher import taught
from spectr_jax.models.frozen import Frozen
from spectr_jax.models.llama import Llama, LlamaConfig, abstract
from spectr_jax.training.optimizer import make_optimizer
from spectr_jax.training.programs import Programs, compiled
from spectr_jax.training.step import update

DRAFTS = 4
"""Number of drafts of the second reported acceptance, alpha_4."""


def make_programs(
    config: ml_collections.ConfigDict,
    mesh,
    shape: LlamaConfig,
    tokens: np.ndarray,
    teacher: Frozen | None = None,
) -> Programs:
    """Returns the programs of a student's run. With a `teacher`, they label each batch first."""
    graphdef, state = abstract(shape)
    rest = nnx.filter_state(state, nnx.Not(nnx.Param))  # The tokens of the head.
    rest = jax.tree.map(lambda _: jnp.asarray(tokens), rest)
    number_of = np.full(shape.vocab_size, -1, np.int32)
    number_of[tokens] = np.arange(len(tokens))
    optimizer = make_optimizer(config.optimizer, config.steps)

    def model(params):
        return nnx.merge(graphdef, params, rest)

    see = functools.partial(places, model, jnp.asarray(number_of), config.depth)
    loss = losses.LOSSES[config.loss]

    def objective(params, part, key):
        del key  # No dropout.
        real, seen = see(params, part)

        def total(function):
            at_each = jax.vmap(jax.vmap(jax.vmap(function)))
            return jnp.sum(real * at_each(seen), axis=(1, 2))

        own, accepted = total(loss), jax.lax.stop_gradient(total(losses.acceptance))
        text = total(losses.cross_entropy) if config.cross_entropy else 0.0
        return jnp.mean(own + config.cross_entropy * text), {"loss": own[0], "alpha_1": accepted[0]}

    def labelled(batch, teacher, tokens=None):
        layers = shape.feature_layers if shape.features else None
        return taught(teacher, batch, layers, tokens) if teacher else batch

    # Training labels all tokens of a small head, which is exact and needs no sort of the vocabulary;
    # on a GPU the sort takes longer than the teacher. Held-out scores use labels as on disk.
    head_tokens = jnp.asarray(tokens) if shape.head_tokens else None

    def step(state, batch, teacher=None):
        seen = labelled(batch, teacher, head_tokens)
        return update(objective, optimizer, config.accumulate, state, seen)

    def evaluate(params, batch, teacher=None):
        return summed_scores(see, params, labelled(batch, teacher))

    return compiled(
        mesh,
        build=lambda rngs: build(shape, tokens, rngs),
        optimizer=optimizer,
        step=step,
        evaluate=evaluate,
        given=(teacher,) if teacher else (),
    )


def places(
    model: Callable[[Any], Llama],
    number_of: jax.Array,
    depth: int,
    params: Any,
    batch: dict[str, jax.Array],
) -> tuple[jax.Array, losses.Place]:
    """Returns which places [S, B, N] of a batch are real, and what the losses see there.

    The student's softmax is over the tokens that its head scores. A batch without `top` has labels
    of all of these. S is the number of levels (`students.levels`).
    """
    student = model(params)
    hidden = students.levels(student, batch, depth)
    head = student.head.linear if student.config.head_tokens else student.head
    log_p = jax.nn.log_softmax(head(hidden).astype(jnp.float32))
    levels = jnp.arange(len(hidden))[:, None, None]

    def of(tokens):
        numbers = jnp.where(tokens < 0, -1, number_of[tokens])
        numbers = jnp.broadcast_to(numbers, (len(hidden), *numbers.shape))
        found = jnp.take_along_axis(log_p, jnp.maximum(numbers, 0), axis=-1)
        return jnp.where(numbers < 0, -jnp.inf, found)

    log_q = batch["log_probabilities"]
    log_q = jnp.broadcast_to(log_q, (len(hidden), *log_q.shape))
    real = (batch["segments"] > 0) & (batch["positions"] >= levels)
    target = of(batch["targets"][..., None])[..., 0]
    if "top" in batch:
        return real, losses.Place(log_p=of(batch["top"]), log_q=log_q, log_target=target)
    rest = jnp.zeros_like(target)  # The head scores no token without a label.
    return real, losses.Place(log_p=log_p, log_q=log_q, log_target=target, rest=rest)


def summed_scores(see: Callable, params: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns sums [S] over the tokens of a batch: KL(q, p), alpha_1, alpha_4 of the exact plan,
    and the number of tokens.

    Only tokens after which a draft is requested count. At level s the path must also start at such
    a token.
    """
    real, seen = see(params, batch)
    drafted = batch["drafted"]
    real &= drafted & jnp.stack([jnp.roll(drafted, level, axis=1) for level in range(len(real))])

    def total(function):
        # One row at a time, because `optimal_acceptance` sorts.
        found = jax.lax.map(lambda level: jax.lax.map(jax.vmap(function), level), seen)
        return jnp.sum(real * found, axis=(1, 2))

    optimum = functools.partial(losses.optimal_acceptance, drafts=DRAFTS)
    return {
        "kl": total(losses.kl),
        "alpha_1": total(losses.acceptance),
        f"alpha_{DRAFTS}": total(optimum),
        "tokens": jnp.sum(real, axis=(1, 2)),
    }
