"""A second-order Markov model given by a table: exact distributions for theory and tests.

Its next token depends on one that only the cache holds, so that a wrong ancestor mask, a wrong
position or a wrongly gathered row changes the distribution.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models import cache as cache_lib
from spectr_jax.models.cache import Cache


class TableModel(nnx.Module):
    """A model whose next-token logits are log table[token before the last, last token].

    Token 0 precedes the first token of a sequence. Cache rows are (token, position).
    """

    def __init__(
        self, table_VxVxV: jax.Array, context: int = 128, exits: tuple[jax.Array, ...] = ()
    ):
        """`exits` are tables of earlier layers, for early exit."""
        tables = [jnp.asarray(table, jnp.float32) for table in (*exits, table_VxVxV)]
        self.tables = nnx.List(map(nnx.Param, tables))
        self.context = context

    @property
    def vocab_size(self) -> int:
        return self.tables[-1].shape[-1]

    @property
    def layers(self) -> int:
        return len(self.tables)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns an empty cache; the position -1 marks a slot without a token."""
        rows = (jnp.zeros((batch, capacity), jnp.int32), jnp.full((batch, capacity), -1, jnp.int32))
        return Cache(rows, jnp.zeros(batch, jnp.int32))

    def extend(
        self, tokens_BxN, positions_BxN, visible_BxNxM, cache=None, pending=0, *, layers=None
    ):
        """See `Model.extend`."""
        mask_BxNxT, starts_B = cache_lib.mask_and_starts(cache, visible_BxNxM, pending)
        rows = None if cache is None else cache.rows
        (all_tokens_BxT, all_positions_BxT), rows = cache_lib.append(
            rows, (tokens_BxN, positions_BxN), starts_B
        )
        is_parent_BxNxT = mask_BxNxT & (
            all_positions_BxT[:, None, :] == positions_BxN[:, :, None] - 1
        )
        before_BxN = jnp.sum(jnp.where(is_parent_BxNxT, all_tokens_BxT[:, None, :], 0), axis=-1)
        logits = jnp.log(self.tables[(layers or self.layers) - 1][...])[before_BxN, tokens_BxN]
        return logits, None if cache is None else Cache(rows, cache.lengths)


def random_table(seed: int, vocab_size: int, concentration: float = 1.0) -> np.ndarray:
    """Returns a table [V, V, V] of Dirichlet rows."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(vocab_size, concentration), size=(vocab_size, vocab_size))


def perturbed(table: np.ndarray, seed: int, noise: float) -> np.ndarray:
    """Returns the table with log-normal noise and rows that sum to one: a draft of `table`."""
    noisy = table * np.exp(noise * np.random.default_rng(seed).standard_normal(table.shape))
    return noisy / noisy.sum(-1, keepdims=True)


def exact_pmf(
    table: np.ndarray, prompt: tuple[int, ...], length: int, eos: int | None = None
) -> dict:
    """Returns {continuation of `prompt`: probability}, of `length` tokens or up to `eos`."""
    pmf = {}
    for tokens in itertools.product(range(table.shape[0]), repeat=length):
        ended = tokens.index(eos) + 1 if eos in tokens else length
        if any(tokens[ended:]):
            continue  # Zeros after EOS represent all continuations with this prefix.
        sequence, probability = (0, *prompt), 1.0
        for token in tokens[:ended]:
            probability *= table[sequence[-2], sequence[-1], token]
            sequence += (token,)
        pmf[tokens[:ended]] = probability
    return pmf
