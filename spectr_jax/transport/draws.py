"""Uniforms, draws from weights, and exponential races.

docs/architecture.md, section "What exact means", bounds their errors.
"""

import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from spectr_jax.transport.types import Key, Probs, Scalar
from spectr_jax.utils import sharding

WIDTH = 64
"""The largest number of candidates in a race of `draw`. Devices of a mesh's axis `model` divide it."""


def uniform(key: Key, shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
    """Returns float32 uniforms in (0, 1) of the given `shape`; consumes `key`.

    They are odd multiples of 2^-33, rounded to 24 bits. Those of `jax.random.uniform` are multiples
    of 2^-23 and can be 0, which would accept a draft of acceptance 1e-9 with probability 1e-7.
    """
    bits = jax.random.bits(key, shape, jnp.uint32)
    # Rounding would turn the largest words into 1, which is not below a probability of 1.
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)


def draw(key: Key, weights: Probs, shape: tuple[int, ...] = ()) -> Int[Array, "..."]:
    """Returns tokens of the given `shape`, drawn in proportion to `weights` [V]; consumes `key`.

    Draws one of `WIDTH` blocks of tokens, then a smaller block within it, and so on down to the
    token, each by an exponential race: candidate i arrives at time e_i / w_i with e_i ~ Exp(1), and
    the first wins. A race keeps the relative precision of small weights, which cumulative sums lose.
    Blocks need only `WIDTH` uniforms a stage; one race of all tokens (the Gumbel trick) needs V. If
    the vocabulary is split over devices, the first blocks are, and little more than their sums
    moves. A token of weight 0 is never drawn. If all weights are 0, token 0 is drawn. Weights are
    read as float32, from its smallest normal number (a CPU takes smaller ones for 0) to 1e21.
    """
    weights = jnp.asarray(weights, jnp.float32)
    sums, widths, lengths = _sums(weights)
    *ends, words = itertools.accumulate(widths)

    def draw_one(clocks: Float[Array, " words"]) -> Scalar:
        index = jnp.int32(0)  # Of the block so far, among all blocks of its size.
        for stage, length, width, clock in zip(
            sums, lengths, widths, jnp.split(clocks, ends), strict=True
        ):
            # A row of `length` candidates is in blocks of `width`. The last row may be
            # shorter, and the last block of each.
            row, block = index // -(-length // width), index % -(-length // width)
            if length % width or len(stage) % width:
                places = block * width + jnp.arange(width)
                found = stage.at[row * length + places].get(mode="fill", fill_value=0)
                candidates = jnp.where(places < length, found, 0)
            else:
                candidates = stage.reshape(-1, width)[index]
            candidates = sharding.whole(candidates)
            index = row * length + block * width + _first(candidates, clock)
        return index

    clocks = sharding.whole(-jnp.log1p(-uniform(key, (*shape, words))))
    return jax.vmap(draw_one)(clocks.reshape(-1, words)).reshape(shape)


def _sums(weights: Probs) -> tuple[list[Float[Array, " _"]], list[int], list[int]]:
    """Returns the weights of all candidates of each stage, from rows of tokens to single tokens;
    the number of candidates of a race; and the number of candidates of a row of all stages."""
    length = -(-len(weights) // WIDTH)
    if length == 1:
        return [weights], [len(weights)], [len(weights)]
    rows = jnp.pad(weights, (0, -len(weights) % length)).reshape(-1, length)
    sums, widths, lengths = [weights], [min(length, WIDTH)], [length]
    while lengths[0] > WIDTH:
        blocks = jnp.pad(rows, ((0, 0), (0, -lengths[0] % WIDTH))).reshape(-1, WIDTH)
        rows = jnp.sum(blocks, axis=1).reshape(len(rows), -1)
        sums.insert(0, rows.ravel())
        lengths.insert(0, rows.shape[1])
        widths.insert(0, min(lengths[0], WIDTH))
    every = jnp.sum(rows, axis=1)
    return [every, *sums], [len(every), *widths], [len(every), *lengths]


def _first(weights: Float[Array, " n"], clocks: Float[Array, " n"]) -> Scalar:
    """Returns the winner of the race of `weights` with the given `clocks`."""
    # The largest rate, w / e, is the earliest time. Its factor keeps rates of tiny weights from
    # underflow. A candidate of weight 0 loses to all others.
    return jnp.argmax(jnp.where(weights > 0, weights * 2.0**24 / clocks, -1)).astype(jnp.int32)


def log_arrivals(key: Key, pmf: Probs) -> Probs:
    """Returns the logarithms of the arrival times [V] in the race of `pmf`; inf if never.

    `key` determines the clocks.
    """
    # Rare tokens win by tiny clocks. Default uniforms are multiples of 2^-23, too coarse for tokens
    # below 1e-7, which can hold 1e-3 of the mass.
    pmf = pmf.astype(jnp.float32)
    return -(jax.random.gumbel(key, pmf.shape, pmf.dtype, mode="high") + jnp.log(pmf))


def arrivals(key: Key, p: Probs, count: int) -> Int[Array, " {count}"]:
    """Returns the first `count` tokens in the race of p [V]; `select` must get the same `key`."""
    return jax.lax.top_k(-log_arrivals(key, p), count)[1].astype(jnp.int32)
