"""Small decoders of the Llama family for a teacher's vocabulary, and what they take from the teacher before they learn."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.distillation.labels import LabelledRows
from spectr_jax.errors import UserError
from spectr_jax.models.llama import Llama, LlamaConfig, abstract
from spectr_jax.models.vocabulary import Kept

COUNTED_ROWS = 4_096
"""Labelled rows from which the frequent tokens are found."""


def frequent_tokens(rows: LabelledRows, count: int) -> np.ndarray:
    """The `count` tokens to which the teacher gives most probability in its labels, int32 in ascending order.

    Raises:
      UserError: the teacher has fewer tokens.
    """
    if count > rows.vocab_size:
        raise UserError(f"model.head_tokens={count} is more than the teacher's {rows.vocab_size} tokens; give at most that")
    mass = np.zeros(rows.vocab_size)
    spread = np.linspace(0, len(rows) - 1, min(len(rows), COUNTED_ROWS)).astype(int)
    for part in np.array_split(spread, -(-len(spread) // 256)):
        taken = rows.take(part)
        real = taken["segments"] > 0
        weights = np.exp(taken["log_probabilities"][real].astype(np.float32)).ravel()
        mass += np.bincount(taken["top"][real].ravel(), weights, rows.vocab_size)
    return np.sort(np.argsort(-mass, kind="stable")[:count]).astype(np.int32)


def build(config: LlamaConfig, tokens: np.ndarray, rngs: nnx.Rngs) -> Llama:
    """A student of random weights whose head scores `tokens`."""
    model = Llama(config, rngs=rngs)
    if config.head_tokens:
        model.head.tokens = Kept(jnp.asarray(tokens))
    return model


def with_embedding(params: nnx.State, config: LlamaConfig, table: jax.Array, tokens: np.ndarray) -> nnx.State:
    """The parameters of a student, with an embedding and a head that begin as the teacher's, as far as they fit.

    The embedding becomes the first principal components of the teacher's [V, E'], of unit variance all in all; the head
    scores a token by its embedding.

    Args:
      params: of a student of random weights.
      config: its shape.
      table: the teacher's embedding, float32 [V, E'].
      tokens: that its head scores.
    """
    rank = config.embed_rank or config.width
    coordinates = principal_components(table, rank)
    state = jax.tree.map(lambda leaf: leaf, params)
    if config.embed_rank:
        state["embed"]["table"]["embedding"].value = coordinates
        wide = coordinates @ state["embed"]["widen"]["kernel"].value
    else:
        state["embed"]["embedding"].value = coordinates
        wide = coordinates
    if config.tied:
        return state
    kernel = wide[tokens].T / jnp.sqrt(config.width)
    if config.head_tokens:
        state["head"]["linear"]["kernel"].value = kernel
    else:
        state["head"]["kernel"].value = kernel
    return state


def principal_components(table: jax.Array, rank: int) -> jax.Array:
    """[V, rank] coordinates of the rows of `table` [V, E], of mean square 1; columns beyond E are 0."""
    centred = jnp.asarray(table, jnp.float32) - jnp.mean(table, axis=0)
    _, axes = jnp.linalg.eigh(centred.T @ centred)  # Ascending.
    coordinates = centred @ axes[:, ::-1][:, :rank]
    coordinates /= jnp.sqrt(jnp.mean(jnp.square(coordinates)))
    return jnp.pad(coordinates, ((0, 0), (0, rank - coordinates.shape[1])))


def parameters(config: LlamaConfig) -> int:
    """Parameters without the embedding table, which a call reads one row of a token of."""
    _, state = abstract(config)
    rank = config.embed_rank or config.width
    total = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state))
    return total - (0 if config.tied else config.vocab_size * rank)
