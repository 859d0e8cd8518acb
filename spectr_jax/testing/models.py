"""Checks of models: one function per property, and `check_model` for all of them."""

import functools
import inspect
import numbers
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.models.base import Model
from spectr_jax.models.cache import Cache, keep
from spectr_jax.models.frozen import Frozen, Trained, freeze
from spectr_jax.utils.errors import UserError

BATCH, TOKENS, CAPACITY = 4, 12, 20
"""Number of sequences, of their tokens, and of cache slots."""
PREFIXES = (1, 3, 4, 6)
"""Number of committed tokens of each sequence."""
PIECE = 3
"""Number of tokens fed per call."""
AT = np.array(PREFIXES)[:, None] + np.arange(4)
"""The positions [B, 4] that follow them."""


def check_model(
    model: Model | Frozen | Trained, *, layers: int | None = None, tolerance: float = 1e-4
) -> None:
    """Checks that a model follows the protocol of `spectr_jax.models.base`, on random tokens.

    Logits must depend only on visible tokens and their positions, not on hidden tokens or other
    rows. A sequence fed in pieces through the cache, and the branches of a tree scored in one call,
    must have the logits of separate calls. A target that shows features (`ShowsFeatures`) must also
    have them through `hidden` and `logits_of`; a draft that sees features runs on arbitrary ones.

    Args:
      model: as for `generate`, with a context of at least `TOKENS`.
      layers: also checks the model of the first `layers` layers, for self-speculation, and that the
        whole model continues correctly after it. None checks only the whole model.
      tolerance: largest allowed difference of logits, times the largest logit if that exceeds 1.
        bfloat16 and int8 need a larger one.

    Raises:
      AssertionError: the model is wrong; the message says where.
      UserError: its context is too short, or an argument is invalid.
    """
    frozen = freeze(model)
    if layers is not None:
        if frozen.features_seen:
            raise UserError(f"layers={layers!r}: must be None for a draft that sees features")
        most = max(frozen.merge().layers, 2) - 1
        if not isinstance(layers, numbers.Integral) or not 1 <= layers <= most:
            raise UserError(f"layers={layers!r}: must be None or an integer in 1..{most}")
    if not isinstance(tolerance, numbers.Real) or not tolerance >= 0:
        raise UserError(f"tolerance={tolerance!r}: must be at least 0; give one such as 1e-4")
    if frozen.context < TOKENS:
        raise UserError(f"context={frozen.context}: is too short; give at least {TOKENS}")
    _check_calls(frozen)
    model = _Checked(frozen, layers, tolerance)
    for check in (_check_shapes, _check_batch, _check_mask, _check_cache, _check_tree, _check_exit):
        check(model)
    if frozen.features_shown and not frozen.features_seen:
        _check_features(model)


class _Checked:
    """A model that takes and returns NumPy arrays.

    Logits are those of `extend`; with `also`, of `hidden(..., also=also)` and `logits_of`.
    """

    def __init__(self, frozen: Frozen, layers: int | None, tolerance: float, also=None):
        self.frozen, self.layers, self.tolerance, self.also = frozen, layers, tolerance, also
        self.tokens = np.random.default_rng(0).integers(0, frozen.vocab_size, (BATCH, TOKENS))

    def extend(self, tokens, positions, visible, cache=None, pending=0) -> tuple[np.ndarray, Any]:
        """Returns logits [B, N, V] and the cache."""
        arrays = jnp.int32(tokens), jnp.int32(positions), jnp.asarray(visible, bool)
        result = _extend(pending, self.layers, self.also, self.frozen, *arrays, cache)
        if not isinstance(result, tuple) or len(result) != 2:
            self.fail(f"`extend` returns {type(result).__name__}, not (logits, cache)")
        if cache is not None and not isinstance(result[1], Cache):
            self.fail(f"`extend` returns {type(result[1]).__name__} in place of a `Cache`")
        return np.asarray(result[0]), result[1]

    def whole(self, tokens: np.ndarray) -> np.ndarray:
        """Returns logits [B, N, V] of one call without a cache."""
        return self.extend(*_causal(tokens))[0]

    def empty(self) -> Cache:
        return self.frozen.merge().init_cache(BATCH, CAPACITY)

    def prefilled(self) -> Cache:
        """Returns a cache with the first `PREFIXES` tokens committed, and other rows after them."""
        _, cache = self.extend(*_causal(self.tokens[:, : max(PREFIXES)]), self.empty())
        return Cache(cache.rows, jnp.array(PREFIXES, jnp.int32))

    def same(self, logits: np.ndarray, expected: np.ndarray, message: str) -> None:
        """Raises `message` unless logits [B, N, V] equal the expected ones."""
        largest = np.abs(expected).max(initial=1, where=np.isfinite(expected))
        with np.errstate(invalid="ignore"):
            off = np.where(logits == expected, 0, np.abs(logits - expected)).max(-1)
        if not off.max() <= self.tolerance * largest:
            row, token = np.unravel_index(off.argmax(), off.shape)
            where = f"new token {token} of row {row}"
            self.fail(f"{message}: logits differ by {off.max():.3g} at {where}")

    def fail(self, message: str) -> NoReturn:
        call = "" if self.also is None else f"hidden(..., also={self.also}): "
        raise AssertionError(f"model {type(self.frozen.merge()).__name__}: {call}{message}")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _extend(pending: int, layers, also, frozen: Frozen, tokens, positions, visible, cache):
    model, arguments = frozen.merge(), (tokens, positions, visible, cache, pending)
    if frozen.features_seen:
        features = _features(frozen, tokens, positions)
        hidden, cache = model.hidden(*arguments, features_BxNxE=features)
    elif also is not None:
        hidden, cache = model.hidden(*arguments, **({"also": also} if also else {}))
        shape = (*tokens.shape, (1 + len(also)) * frozen.features_shown)
        if hidden.shape != shape or hidden.dtype != jnp.float32:
            found = f"{hidden.dtype}{list(hidden.shape)}, not float32{list(shape)}"
            raise AssertionError(f"model {type(model).__name__}: hidden states are {found}")
        hidden = hidden[..., : frozen.features_shown]
    else:
        return model.extend(*arguments, layers=layers)
    return model.logits_of(hidden), cache


def _features(frozen: Frozen, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Returns features [B, N, F] of a target that depend only on the token and its position."""
    channels = jnp.arange((1 + len(frozen.feature_layers)) * frozen.features_seen)
    features = jnp.cos(0.7 * tokens[..., None] + 0.3 * positions[..., None] + channels)
    return jnp.where(positions[..., None] == 0, 0, features)


def _check_calls(frozen: Frozen) -> None:
    """Each function takes the arguments of the protocol."""
    model, five = frozen.merge(), ("tokens", "positions", "visible", "cache", "pending")
    calls: list[tuple] = [
        ("init_cache", ("batch", "capacity"), {}),
        ("extend", five, {"layers": None}),
    ]
    if frozen.features_seen or frozen.features_shown:
        option = {"features_BxNxE": None} if frozen.features_seen else {"also": ()}
        calls += [("hidden", five, option), ("logits_of", ("hidden",), {})]
    for name, given, named in calls:
        function: Any = getattr(model, name, None)
        try:
            inspect.signature(function).bind(*given, **named)
        except TypeError as error:
            wanted = ", ".join((*given, *(f"{option}=" for option in named)))
            raise AssertionError(
                f"model {type(model).__name__}: {name} does not take ({wanted}): {error}"
            ) from error


def _check_shapes(model: _Checked) -> None:
    """Logits are float32 [B, N, V], cache rows [B, T, ...], and `extend` keeps the lengths."""
    cache: Any = model.empty()
    if not isinstance(cache, Cache):
        model.fail(f"`init_cache` returns {type(cache).__name__}, not a `Cache`")
    shapes = [leaf.shape for leaf in jax.tree.leaves(cache.rows)]
    if any(shape[:2] != (BATCH, CAPACITY) for shape in shapes) or np.any(cache.lengths):
        found = f"rows {shapes} and lengths {cache.lengths}"
        model.fail(f"init_cache({BATCH}, {CAPACITY}) has {found}, not [B, T, ...] and 0")
    logits, after = model.extend(*_causal(model.tokens[:, : max(PREFIXES)]), cache)
    wanted = (BATCH, max(PREFIXES), model.frozen.vocab_size)
    if logits.shape != wanted or logits.dtype != np.float32:
        model.fail(f"logits are {logits.dtype}{list(logits.shape)}, not float32{list(wanted)}")
    if np.any(after.lengths):
        model.fail("`extend` changes the cache's lengths; leave this to `cache.keep`")


def _check_batch(model: _Checked) -> None:
    """The logits of a sequence do not depend on the other rows of its batch."""
    alone = np.concatenate([model.whole(row[None]) for row in model.tokens])
    model.same(model.whole(model.tokens), alone, "a row depends on the other rows of its batch")


def _check_mask(model: _Checked) -> None:
    """A token sees neither later tokens nor another sequence in the same row."""
    half, tokens = TOKENS // 2, model.tokens
    whole, other = model.whole(tokens), tokens.copy()
    other[:, half:] = (tokens[:, half:] + 1) % model.frozen.vocab_size
    message = "a token depends on later tokens, which `visible` hides"
    model.same(model.whole(other)[:, :half], whole[:, :half], message)
    place = np.arange(TOKENS)
    visible = np.tri(TOKENS, dtype=bool) & (place[:, None] // half == place // half)
    packed = np.concatenate([tokens[:1, :half], tokens[1:2, :half]], axis=1)
    logits, _ = model.extend(packed, place[None] % half, visible[None])
    apart = np.concatenate([whole[:1, :half], whole[1:2, :half]], axis=1)
    model.same(logits, apart, "two sequences in one row see each other, which `visible` hides")
    odd = np.arange(BATCH)[:, None] % 2 == 1  # Every second row is packed, so that masks differ.
    _, positions, causal = _causal(tokens)
    masks = np.where(odd[:, :, None], visible, causal)
    logits, _ = model.extend(
        np.where(odd, packed, tokens), np.where(odd, place % half, positions), masks
    )
    expected = np.where(odd[:, :, None], apart, whole)
    model.same(logits, expected, "a row uses `visible` of another row")


def _check_cache(model: _Checked) -> None:
    """Tokens fed in pieces after prefixes of several lengths have the logits of one call."""
    cache, whole = model.prefilled(), model.whole(model.tokens)
    message = (
        "a sequence fed in pieces through the cache differs from one call; use the given positions,"
        " and write rows after cache.lengths + pending"
    )
    for _ in range(2):
        at = np.asarray(cache.lengths)[:, None] + np.arange(PIECE)
        _, _, visible = _causal(at)
        logits, cache = model.extend(np.take_along_axis(model.tokens, at, 1), at, visible, cache)
        model.same(logits, np.take_along_axis(whole, at[:, :, None], 1), message)
        cache = _kept(cache, np.arange(PIECE))


def _check_tree(model: _Checked) -> None:
    """Branches scored together, level by level, match each one alone, even after a commit."""
    branches, alone = [], []
    for number in range(2):
        sequences = model.tokens.copy()
        branches.append((np.take_along_axis(sequences, AT, 1) + number) % model.frozen.vocab_size)
        np.put_along_axis(sequences, AT, branches[-1], 1)
        alone.append(np.take_along_axis(model.whole(sequences), AT[:, :, None], 1))

    def score(nodes, visible, cache, pending, message):
        tokens, expected = (
            np.stack([part[branch][:, depth] for branch, depth in nodes], 1)
            for part in (branches, alone)
        )
        positions = np.stack([AT[:, depth] for _, depth in nodes], 1)
        visible = np.broadcast_to(np.array(visible), (BATCH, *np.shape(visible)))
        logits, cache = model.extend(tokens, positions, visible, cache, pending)
        model.same(logits, expected, message)
        return cache

    levels = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    message = "a tree differs from its branches alone; siblings have one position"
    cache = score([(0, 0), (0, 1), (1, 0), (1, 1)], levels, model.prefilled(), 0, message)
    third = [[1, 1, 0, 0, 1, 0], [0, 0, 1, 1, 0, 1]]
    message = "a level after pending tokens differs from its branches alone; `visible` starts with "
    cache = score([(0, 2), (1, 2)], third, cache, 4, message + "the pending tokens")
    message = "after a branch is committed, the next token differs from the branch alone"
    score([(1, 3)], [[1]], _kept(cache, np.array([2, 3, 5])), 0, message)


def _check_exit(model: _Checked) -> None:
    """A call of the first layers leaves the cache rows of the others unchanged."""
    if model.layers is None:
        return
    whole, lengths = _Checked(model.frozen, None, model.tolerance), np.array(PREFIXES, np.int32)
    cache = whole.prefilled()
    # Self-speculation runs the first layers on the last committed token again.
    last = lengths[:, None] - 1
    again = np.take_along_axis(model.tokens, last, 1), last, np.ones((BATCH, 1, 1), bool)
    _, cache = model.extend(*again, Cache(cache.rows, jnp.asarray(lengths - 1)))
    new = np.take_along_axis(model.tokens, AT[:, :1], 1), AT[:, :1], np.ones((BATCH, 1, 1), bool)
    logits, _ = whole.extend(*new, Cache(cache.rows, jnp.asarray(lengths)))
    expected = np.take_along_axis(whole.whole(model.tokens), AT[:, :1, None], 1)
    message = f"after a call with layers={model.layers} the whole model differs"
    whole.same(logits, expected, message + "; keep the cache rows of the other layers")


def _check_features(model: _Checked) -> None:
    """The hidden states of a target have the logits of `extend`, whatever `also` is."""
    plain = _Checked(model.frozen, None, model.tolerance).whole(model.tokens)
    for also in ((), (1,)):
        shown = _Checked(model.frozen, None, model.tolerance, also)
        message = "`logits_of` these hidden states differs from `extend`"
        shown.same(shown.whole(model.tokens), plain, message)
        _check_tree(shown)


def _causal(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tokens [B, N], positions [B, N] and the causal mask [B, N, N] of whole sequences."""
    B, N = tokens.shape
    positions, visible = np.arange(N), np.tri(N, dtype=bool)
    return tokens, np.broadcast_to(positions, (B, N)), np.broadcast_to(visible, (B, N, N))


def _kept(cache: Cache, path: np.ndarray) -> Cache:
    """Returns the cache with the pending rows of `path` [D] committed."""
    paths = jnp.broadcast_to(path, (BATCH, len(path)))
    return jax.jit(keep)(cache, paths, cache.lengths + len(path))
