"""A second-order Markov model given by a table: exact distributions for theory and tests, in the
`Model` protocol.

Second order on purpose: the next token depends on a token that only the cache remembers, so a wrong
ancestor mask, a wrong position or a wrongly gathered row changes the distribution.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from spectr_jax.models import cache as cache_lib
from spectr_jax.models.cache import Cache


class TableModel(nnx.Module):
    """logits of the next token = log table[token before the last, last token]; cache rows are
    (token, position).

    The first token of a sequence has no token before it; token 0 stands in.
    """

    def __init__(
        self, table_VxVxV: jax.Array, context: int = 128, exits: tuple[jax.Array, ...] = ()
    ):
        """`exits` are tables that stand for earlier layers, for early exit."""
        self.tables = nnx.List(
            [nnx.Param(jnp.asarray(table, jnp.float32)) for table in (*exits, table_VxVxV)]
        )
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
        if cache is None:
            rows, mask_BxNxT = (tokens_BxN, positions_BxN), visible_BxNxM
        else:
            starts_B = cache.lengths + pending
            new = (tokens_BxN, positions_BxN)
            cache = Cache(
                tuple(
                    cache_lib.write(old, row, starts_B)
                    for old, row in zip(cache.rows, new, strict=True)
                ),
                cache.lengths,
            )
            rows = cache.rows
            mask_BxNxT = cache_lib.visible_slots(visible_BxNxM, cache.lengths, rows[0].shape[1])
        all_tokens_BxT, all_positions_BxT = rows
        is_parent_BxNxT = mask_BxNxT & (
            all_positions_BxT[:, None, :] == positions_BxN[:, :, None] - 1
        )
        before_BxN = jnp.sum(jnp.where(is_parent_BxNxT, all_tokens_BxT[:, None, :], 0), axis=-1)
        return jnp.log(self.tables[(layers or self.layers) - 1][...])[before_BxN, tokens_BxN], cache


def random_table(seed: int, vocab_size: int, concentration: float = 1.0) -> np.ndarray:
    """Returns a table [V, V, V] of Dirichlet rows."""
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(vocab_size, concentration), size=(vocab_size, vocab_size))


def perturbed(table: np.ndarray, seed: int, noise: float) -> np.ndarray:
    """Returns the table with log-normal noise on every entry, rows normalised again: a draft of the
    given table."""
    noisy = table * np.exp(noise * np.random.default_rng(seed).standard_normal(table.shape))
    return noisy / noisy.sum(-1, keepdims=True)


def exact_pmf(
    table: np.ndarray, prompt: tuple[int, ...], length: int, eos: int | None = None
) -> dict:
    """Returns the distribution of continuations of `prompt`: {continuation: probability}, each
    `length` tokens or ended by `eos` (kept)."""
    pmf = {}
    for tokens in itertools.product(range(table.shape[0]), repeat=length):
        ended = tokens.index(eos) + 1 if eos in tokens else length
        if any(tokens[ended:]):
            continue  # One representative (zeros behind EOS) of all continuations that share this prefix.
        sequence, probability = (0, *prompt), 1.0
        for token in tokens[:ended]:
            probability *= table[sequence[-2], sequence[-1], token]
            sequence += (token,)
        pmf[tokens[:ended]] = probability
    return pmf
