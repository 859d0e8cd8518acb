"""Students, which are small Llama decoders for a teacher's vocabulary, and their initialisation."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.distillation.labels import LabelledRows
from spectr_jax.models.cache import differentiable
from spectr_jax.models.layers.attention import causal
from spectr_jax.models.llama import Llama, LlamaConfig, abstract
from spectr_jax.models.vocabulary import Constant

WEIGHED_ROWS = 4_096
"""Number of rows over whose labels `tokens_by_mass` sums."""


def tokens_by_mass(rows: LabelledRows, count: int) -> np.ndarray:
    """Returns the `count` tokens with the most probability in the teacher's labels, int32 in
    ascending order."""
    mass = np.zeros(rows.vocab_size)
    spread = np.linspace(0, len(rows) - 1, min(len(rows), WEIGHED_ROWS)).astype(int)
    for part in np.array_split(spread, -(-len(spread) // 256)):
        taken = rows.take(part)
        real = taken["segments"] > 0
        weights = np.exp(taken["log_probabilities"][real].astype(np.float32)).ravel()
        mass += np.bincount(taken["top"][real].ravel(), weights, rows.vocab_size)
    return np.sort(np.argsort(-mass, kind="stable")[:count]).astype(np.int32)


def build(config: LlamaConfig, tokens: np.ndarray, rngs: nnx.Rngs) -> Llama:
    """Returns a student with random weights whose head scores `tokens`."""
    model = Llama(config, rngs=rngs)
    if config.head_tokens:
        model.head.tokens = Constant(jnp.asarray(tokens))
    return model


def start_from_embedding(model: Llama, table: jax.Array) -> None:
    """Initialises a student's embedding and head from its teacher's embedding.

    The embedding becomes the first principal components of the teacher's `table`, float32 [V, E],
    scaled to mean square 1. The head's weights of a token are its embedding, scaled.
    """
    config = model.config
    coordinates = principal_components(table, config.embed_rank or config.width)
    if config.embed_rank:
        model.embed.table.embedding[...] = coordinates
        coordinates = coordinates @ model.embed.widen.kernel[...]
    else:
        model.embed.embedding[...] = coordinates
    set_head(model, coordinates / jnp.sqrt(config.width))


def set_head(model: Llama, head: jax.Array) -> None:
    """Copies a head, float32 [V, E], to a student, for the tokens that it scores."""
    if model.config.head_tokens:
        model.head.linear.kernel[...] = head[model.head.tokens[...]].T
    else:
        model.head.kernel[...] = head.T


def levels(model: Llama, batch: dict[str, jax.Array], depth: int) -> jax.Array:
    """Returns the student's hidden states [S, B, N, E] at each place of a batch.

    S is 1, or `depth` for a student that sees features. At level s a place is the end of a path of
    s - 1 drafted tokens. As in decoding, it sees the teacher's features up to the start of the
    path, and the student's own on the path (training-time test of EAGLE-3: Li et al., 2025, arXiv
    2503.01840).

    Args:
      model: the student.
      batch: as `labels.batch_of` returns.
      depth: number of levels.
    """
    tokens, positions, segments = batch["inputs"], batch["positions"], batch["segments"]
    if not model.config.features:
        return model.hidden(tokens, positions, causal(segments))[0][None]
    B, N = tokens.shape
    cache = differentiable(model.init_cache(B, depth * N))
    features, hidden = batch["features"].astype(jnp.float32), []
    between = jnp.arange(N)[:, None] - jnp.arange(N)
    same = segments[:, :, None] == segments[:, None, :]
    for level in range(depth):
        # Earlier levels are pending. Of level r, a place sees only the place `level - r` before it.
        blocks = [between >= level, *(between == level - r for r in range(1, level + 1))]
        visible = jnp.concatenate([same & block for block in blocks], axis=-1)
        # The first token of a sequence has no features before it.
        before = jnp.where(positions[..., None] > 0, jnp.roll(features, 1, axis=1), 0)
        features, cache = model.hidden(
            tokens, positions, visible, cache, level * N, features_BxNxE=before
        )
        hidden.append(features)
    return jnp.stack(hidden)


def principal_components(table: jax.Array, rank: int) -> jax.Array:
    """Returns [V, rank] coordinates of the rows of `table` [V, E], scaled to mean square 1.
    Columns beyond E are 0."""
    centred = jnp.asarray(table, jnp.float32) - jnp.mean(table, axis=0)
    _, axes = jnp.linalg.eigh(centred.T @ centred)  # Eigenvalues ascend.
    coordinates = centred @ axes[:, ::-1][:, :rank]
    coordinates /= jnp.sqrt(jnp.mean(jnp.square(coordinates)))
    return jnp.pad(coordinates, ((0, 0), (0, rank - coordinates.shape[1])))


def parameters(config: LlamaConfig) -> int:
    """Returns the number of parameters without the embedding table, of which a call reads one row
    per token."""
    leaves = jax.tree.leaves(nnx.filter_state(abstract(config)[1], nnx.Param))
    table = 0 if config.tied else config.vocab_size * (config.embed_rank or config.width)
    return sum(int(np.prod(leaf.shape)) for leaf in leaves) - table
