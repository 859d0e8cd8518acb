"""`check_model` accepts models that follow the protocol and reports each error of other models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spectr_jax import check_model, generate, get_method
from spectr_jax.models.cache import Cache
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.testing.models import TOKENS
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


class LogitsOnly(Transformer):
    def extend(self, *args, **rest):
        return super().extend(*args, **rest)[0]


class LosesCache(Transformer):
    def extend(self, *args, **rest):
        return super().extend(*args, **rest)[0], None


class NoCache(Transformer):
    def init_cache(self, batch, capacity):
        return None


class HiddenOfBlocks(Transformer):
    """Shows what its last block returns, before the last norm."""

    def _shown(self, x):
        return x

    def extend(self, *args, **rest):
        hidden, cache = self.hidden(*args, **rest)
        return self.logits_of(self.norm(hidden)), cache


class HiddenWithoutCache(Transformer):
    """Ignores pending tokens, as long as drafts ask for its hidden states."""

    def extend(self, *args, **rest):
        hidden, cache = super().hidden(*args, **rest)
        return self.logits_of(hidden), cache

    def hidden(self, tokens, positions, visible, cache=None, pending=0, **rest):
        return super().hidden(tokens, positions, visible[:, :, pending:], cache, 0, **rest)


class AlsoAlone(Transformer):
    """Returns the outputs of lower layers without the last hidden state."""

    def hidden(self, *args, also=(), **rest):
        hidden, cache = super().hidden(*args, also=also, **rest)
        return hidden[..., -self.features_shown :], cache


class NoAlso(Transformer):
    def hidden(self, tokens, positions, visible, cache=None, pending=0, *, layers=None):
        return super().hidden(tokens, positions, visible, cache, pending, layers=layers)


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
    LogitsOnly: r"`extend` returns \w+, not \(logits, cache\)",
    LosesCache: "`extend` returns NoneType in place of a `Cache`",
    NoCache: "`init_cache` returns NoneType, not a `Cache`",
    Bfloat16Logits: r"logits are bfloat16\[4, 6, 11\], not float32\[4, 6, 11\]",
    HiddenOfBlocks: r"hidden\(\.\.\., also=\(\)\): `logits_of` these .* `extend`" + WHERE,
    HiddenWithoutCache: r"hidden\(\.\.\., also=\(\)\): a level after pending tokens .*" + WHERE,
    AlsoAlone: r"hidden states are float32\[4, 12, 16\], not float32\[4, 12, 32\]",
    NoAlso: r"hidden does not take \(tokens, positions, visible, cache, pending, also=\)",
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


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"vocab_size": None}, "needs a positive integer 'vocab_size', not None; set it"),
        ({"context": 0}, "needs a positive integer 'context', not 0; set it"),
        ({"layers": "2"}, "needs a positive integer 'layers', not '2'; set it"),
        ({"init_cache": None}, "has no method 'init_cache'; add it"),
        ({"extend": None}, "has no method 'extend'; add it"),
    ],
)
def test_models_without_a_part_of_the_protocol_are_refused(part, message):
    """`generate` refuses them too."""
    model = type("Partial", (TableModel,), part)(random_table(0, 5))
    for name, value in part.items():
        object.__setattr__(model, name, value)
    for call in (
        lambda: check_model(model),
        lambda: generate(None, get_method("baseline"), model, None, [[1]], [1], 3),
    ):
        with pytest.raises(UserError, match=f"^model Partial: {message}"):
            call()


class FewArguments(Transformer):
    def extend(self, tokens, positions, visible, cache=None):
        return super().extend(tokens, positions, visible, cache)


class NoLayers(Transformer):
    def extend(self, tokens, positions, visible, cache=None, pending=0):
        return super().extend(tokens, positions, visible, cache, pending)


class NoCapacity(Transformer):
    def init_cache(self, batch):
        return super().init_cache(batch, 9)


@pytest.mark.parametrize(
    ("kind", "name"), [(FewArguments, "extend"), (NoLayers, "extend"), (NoCapacity, "init_cache")]
)
def test_check_model_reports_missing_arguments(kind, name):
    with pytest.raises(AssertionError, match=f"model {kind.__name__}: {name} does not take \\("):
        check_model(kind(SHAPE, rngs=nnx.Rngs(0)))


class ForgetsFeatures(Llama):
    """Moves the features by one token."""

    def hidden(self, *args, features_BxNxE, **rest):
        return super().hidden(*args, features_BxNxE=jnp.roll(features_BxNxE, 1, 1), **rest)


def test_drafts_that_see_features_are_checked_with_features():
    heads = {"heads": 2, "kv_heads": 2, "head_width": 8, "features": 16, "feature_layers": (1,)}
    shape = LlamaConfig(layers=1, width=16, mlp=32, vocab_size=11, context=12, **heads)
    check_model(Llama(shape, rngs=nnx.Rngs(0)))
    with pytest.raises(AssertionError, match="model ForgetsFeatures: .*" + WHERE):
        check_model(ForgetsFeatures(shape, rngs=nnx.Rngs(0)))
    with pytest.raises(UserError, match="layers=1: must be None for a draft that sees features"):
        check_model(Llama(shape, rngs=nnx.Rngs(0)), layers=1)


def test_the_tolerance_grows_with_the_logits():
    """Rounding errors of float32 do, too."""

    class Loud(Transformer):
        def extend(self, *args, **rest):
            hidden, cache = self.hidden(*args, **rest)
            error = jnp.where(args[0].shape[1] == TOKENS, 0, 2e-4)
            return self.logits_of(hidden) + error, cache

        def logits_of(self, hidden):
            return 100 * super().logits_of(hidden)

    check_model(Loud(SHAPE, rngs=nnx.Rngs(0)))
    with pytest.raises(AssertionError, match="model Loud: .*" + WHERE):
        check_model(Loud(SHAPE, rngs=nnx.Rngs(0)), tolerance=1e-7)


def test_impossible_tokens_pass_and_short_contexts_are_refused():
    table = random_table(0, 5)
    table[:, :, 2] = 0
    with np.errstate(divide="ignore"):
        check_model(TableModel(table))
    with pytest.raises(UserError, match=r"context=11: .*12"):
        check_model(TableModel(table, context=11))
