"""`check_model` accepts models that follow the protocol and reports each error of other models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax import check_model
from spectr_jax.models.cache import Cache
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.utils.errors import UserError

SHAPE = TransformerConfig(layers=1, width=16, mlp=32, heads=2, vocab_size=11, context=12)


class LatePositions(Transformer):
    """Shifts positions by one if there is a cache."""

    def extend(self, tokens, positions, visible, cache=None, pending=0, **rest):
        return super().extend(
            tokens, positions + (cache is not None), visible, cache, pending, **rest
        )


class OwnPositions(Transformer):
    """Counts its positions itself, so that siblings have different ones."""

    def extend(self, tokens, positions, visible, cache=None, pending=0, **rest):
        return super().extend(
            tokens, positions[:, :1] + np.arange(tokens.shape[1]), visible, cache, pending, **rest
        )


class SeesAll(Transformer):
    """Ignores the mask."""

    def extend(self, tokens, positions, visible, *args, **rest):
        return super().extend(tokens, positions, jnp.ones_like(visible), *args, **rest)


class Causal(Transformer):
    """Replaces every mask by a causal one."""

    def extend(self, tokens, positions, visible, *args, **rest):
        causal = jnp.broadcast_to(jnp.tri(*visible.shape[1:], dtype=bool), visible.shape)
        return super().extend(tokens, positions, causal, *args, **rest)


class LeaksRows(Transformer):
    """Adds a part of the previous row to each row."""

    def extend(self, *args, **rest):
        logits, cache = super().extend(*args, **rest)
        return logits + 0.1 * jnp.roll(logits, 1, axis=0), cache


class OneMask(Transformer):
    """Uses the mask of the first row for all rows."""

    def extend(self, tokens, positions, visible, *args, **rest):
        return super().extend(
            tokens, positions, jnp.broadcast_to(visible[:1], visible.shape), *args, **rest
        )


class LeaksCachedRows(Transformer):
    """Moves the rows of the cache by one."""

    def extend(self, *args, **rest):
        logits, cache = super().extend(*args, **rest)
        return logits, cache and Cache(
            jax.tree.map(lambda leaf: jnp.roll(leaf, 1, 0), cache.rows), cache.lengths
        )


class ForgetsPending(Transformer):
    """Writes each level of a tree over the previous one."""

    def extend(self, tokens, positions, visible, cache=None, pending=0, **rest):
        return super().extend(tokens, positions, visible[:, :, pending:], cache, 0, **rest)


class Commits(Transformer):
    """Commits its new tokens to the cache."""

    def extend(self, tokens, *args, **rest):
        logits, cache = super().extend(tokens, *args, **rest)
        return logits, cache and Cache(cache.rows, cache.lengths + tokens.shape[1])


class Bfloat16Logits(Transformer):
    def extend(self, *args, **rest):
        logits, cache = super().extend(*args, **rest)
        return logits.astype(jnp.bfloat16), cache


WHERE = r": logits differ by \d\.\d+(e-\d+)? at new token \d+ of row \d"
CACHE = "a sequence fed in pieces through the cache .*"
APART = "two sequences in one row see each other"
WRONG = {
    LatePositions: CACHE + WHERE,
    OwnPositions: APART + ".*" + WHERE,
    SeesAll: "a token depends on later tokens, .*" + WHERE,
    Causal: APART + ".*" + WHERE,
    LeaksRows: "a row depends on the other rows of its batch" + WHERE,
    LeaksCachedRows: CACHE + WHERE,
    ForgetsPending: "a level after pending tokens differs .*" + WHERE,
    OneMask: "a row uses `visible` of another row" + WHERE,
    Commits: "`extend` changes the cache's lengths",
    Bfloat16Logits: r"logits are bfloat16\[4, 6, 11\], not float32\[4, 6, 11\]",
}


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_check_model_reports_each_error(kind):
    with pytest.raises(AssertionError, match=f"^model {kind.__name__}: {WRONG[kind]}") as error:
        check_model(kind(SHAPE, rngs=nnx.Rngs(0)))
    assert "\n" not in str(error.value)


def test_check_model_reports_models_that_are_wrong_on_trees():
    """Causal masks and counted positions are correct for sequences, but wrong for trees."""

    class Sequences(TableModel):
        def extend(self, tokens, positions, visible, cache=None, pending=0, **rest):
            if cache is not None:
                positions = positions[:, :1] + np.arange(tokens.shape[1])
                visible = jnp.broadcast_to(jnp.tri(*visible.shape[1:], dtype=bool), visible.shape)
            return super().extend(tokens, positions, visible, cache, pending, **rest)

    with pytest.raises(AssertionError, match="model Sequences: a tree .*" + WHERE):
        check_model(Sequences(random_table(0, 11)))


def test_check_model_reports_early_exits_that_erase_other_layers():
    """The target reads these rows, so self-speculation would differ from the baseline."""

    class Spoils(Transformer):
        def extend(self, *args, layers=None, **rest):
            logits, cache = super().extend(*args, layers=layers, **rest)
            if layers is not None and cache is not None:
                kept = list(cache.rows)
                kept[layers:] = jax.tree.map(jnp.zeros_like, kept[layers:])
                cache = Cache(type(cache.rows)(kept), cache.lengths)
            return logits, cache

    model = Spoils(dataclasses.replace(SHAPE, layers=2), rngs=nnx.Rngs(0))
    check_model(model)
    with pytest.raises(AssertionError, match="model Spoils: after a call with layers=1"):
        check_model(model, layers=1)


def test_impossible_tokens_pass_and_short_contexts_are_refused():
    table = random_table(0, 5)
    table[:, :, 2] = 0
    with np.errstate(divide="ignore"):
        check_model(TableModel(table))
    with pytest.raises(UserError, match=r"context=11: .*12"):
        check_model(TableModel(table, context=11))
