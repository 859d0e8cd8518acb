"""Rotary positions (Su et al., 2021, arXiv 2104.09864) and the ways to extend them to long contexts.

Each way divides the frequency of each pair of channels by a number, and some also scale cosines and
sines. A pair with divisor infinity is not rotated.

Shape suffixes: B sequences, N tokens, H heads, D head width, R half of it.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.utils import backend


def frequencies(theta: float, head_width: int) -> np.ndarray:
    """Returns radians per position [R] of the channel pairs of a head, in float64."""
    return theta ** (-np.arange(0, head_width, 2) / head_width)


def llama3_divisors(
    theta: float, head_width: int, *, factor: float, low: float, high: float, context: int
) -> tuple[float, ...]:
    """Returns the divisors with which Llama 3.1 extends rotary positions.

    Frequencies with fewer than `low` turns in the original training `context` are divided by
    `factor`; those with more than `high` turns are kept.
    """
    turns_R = context * frequencies(theta, head_width) / (2 * math.pi)
    return _blended(factor, np.clip((turns_R - low) / (high - low), 0, 1))


def yarn_divisors(
    theta: float,
    head_width: int,
    *,
    factor: float,
    context: int,
    slow: float = 1.0,
    fast: float = 32.0,
    whole: bool = True,
) -> tuple[float, ...]:
    """Returns the divisors of YaRN (Peng et al., 2023, arXiv 2309.00071, section 3.2).

    Frequencies with fewer than `slow` turns in the original training `context` are divided by
    `factor`; those with more than `fast` turns are kept. Between them the blend is linear in the
    index of the pair, whose ends are rounded to whole indices if `whole`.
    """

    def index_with(turns: float) -> float:
        return head_width * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = index_with(fast), index_with(slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_width - 1)
    index_R = np.arange(head_width // 2)
    return _blended(factor, 1 - np.clip((index_R - low) / max(high - low, 1e-3), 0, 1))


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Returns the factor of cosines and sines for a context extended by `factor` (YaRN, eq. 22)."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def longrope_scale(factor: float, context: int) -> float:
    """Returns the factor of cosines and sines of LongRoPE (Ding et al., 2024, arXiv 2402.13753)."""
    return math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0


def partial_divisors(head_width: int, share: float, factor: float = 1.0) -> tuple[float, ...]:
    """Returns divisors with which only the first `share` of the pairs is rotated (Gemma 4)."""
    pairs, rotated_pairs = head_width // 2, int(share * head_width // 2)
    return (float(factor),) * rotated_pairs + (math.inf,) * (pairs - rotated_pairs)


def of_first_channels(
    theta: float, head_width: int, channels: int, divisors: tuple[float, ...] = ()
) -> tuple[float, ...]:
    """Returns the divisors of a whole head of which only the first `channels` are rotated.

    `divisors` are those of the rotated pairs, relative to the frequencies of a head of their width.
    """
    of_part = frequencies(theta, channels) / np.array(divisors or 1.0)
    every = frequencies(theta, head_width)
    kept = (every[: len(of_part)] / of_part).tolist()
    return (*kept, *[math.inf] * (len(every) - len(of_part)))


def _blended(factor: float, kept_R: np.ndarray) -> tuple[float, ...]:
    """Returns divisors between `factor`, where `kept_R` is 0, and 1, where it is 1."""
    return tuple((1 / (kept_R + (1 - kept_R) / factor)).tolist())


def turns(
    positions_BxN: jax.Array, frequencies_R: np.ndarray, scale: float = 1.0
) -> tuple[jax.Array, jax.Array]:
    """Returns the cosines and sines [B, N, R] of positions, times `scale` for pairs that rotate."""
    scale_R = np.where(frequencies_R > 0, scale, 1).astype(np.float32)

    def of(positions):
        angles = positions[..., None].astype(jnp.float32) * frequencies_R
        if scale == 1:
            return jnp.cos(angles), jnp.sin(angles)
        return jnp.cos(angles) * scale_R, jnp.sin(angles) * scale_R

    if not backend.on_cpu():
        return of(positions_BxN)
    # A loop, because XLA would fuse the cosines into every reader and recompute them for each head.
    axis = 1 if positions_BxN.shape[1] > 1 else 0
    found = jax.lax.map(of, jnp.moveaxis(positions_BxN, axis, 0))
    return jax.tree.map(lambda part: jnp.moveaxis(part, 0, axis), found)


def rotated(x_BxNxHxD: jax.Array, turns_BxNxR: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns heads rotated by their positions; channels i and D / 2 + i are a pair."""
    cosines, sines = (part[:, :, None] for part in turns_BxNxR)
    first, second = jnp.split(x_BxNxHxD, 2, axis=-1)
    return jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )
