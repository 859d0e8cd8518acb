"""Tests of models that are functions and parameters, and of other pytrees that are models."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from spectr_jax import FunctionalModel, check_model, generate, get_method, load
from spectr_jax.decoding import stream
from spectr_jax.decoding.generate import decode
from spectr_jax.experiments import quality
from spectr_jax.loading import Trained, by_name, register_loader
from spectr_jax.loading.pairs import fitted
from spectr_jax.models import parallel
from spectr_jax.models.base import features_seen, features_shown
from spectr_jax.models.frozen import digest, freeze
from spectr_jax.models.llama import Llama, LlamaConfig
from spectr_jax.models.table import TableModel, random_table
from spectr_jax.models.transformer import Transformer, TransformerConfig
from spectr_jax.models.vocabulary import SharedTokens
from spectr_jax.utils import sharding
from spectr_jax.utils.errors import UserError

V, WIDTH, KEY = 11, 16, jax.random.key(0)
SHAPE = TransformerConfig(layers=2, width=WIDTH, mlp=32, heads=2, vocab_size=V, context=64)
HEADS = {"heads": 4, "kv_heads": 2, "head_width": 4, "context": 64}
FEATURE_DRAFT = LlamaConfig(layers=1, width=WIDTH, mlp=24, vocab_size=V, features=WIDTH, **HEADS)
PROMPTS = [[1, 2, 3], [4, 0, 0]], [3, 1], 12


@dataclasses.dataclass(frozen=True)
class Method:
    """A function of parameters: a method of a module. It is equal to another of equal fields."""

    graphdef: Any
    name: str

    def __call__(self, params, *arguments, **options):
        return getattr(nnx.merge(self.graphdef, params), self.name)(*arguments, **options)


def functional(module) -> FunctionalModel:
    """Returns the functions and parameters of a module."""
    graphdef, params = nnx.split(module)
    return FunctionalModel(
        params,
        extend_fn=Method(graphdef, "extend"),
        init_cache_fn=Method(graphdef, "init_cache"),
        hidden_fn=Method(graphdef, "hidden"),
        logits_fn=Method(graphdef, "logits_of"),
        vocab_size=module.vocab_size,
        context=module.context,
        layers=module.layers,
        features_shown=features_shown(module),
        features_seen=features_seen(module),
    )


def target(seed=0):
    return Transformer(SHAPE, rngs=nnx.Rngs(seed))


def extend(table, *arguments, **options):
    return TableModel(table).extend(*arguments, **options)


def init_cache(table, batch, capacity):
    return TableModel(table).init_cache(batch, capacity)


def table_model(seed=0, **changes) -> FunctionalModel:
    given = {"extend_fn": extend, "init_cache_fn": init_cache, "vocab_size": V, "context": 64}
    table = jnp.asarray(random_table(seed, V), jnp.float32)
    return FunctionalModel(table, **given | {"layers": 1} | changes)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("name", "options", "draft"),
    [
        ("speculative", {"draft_length": 2}, lambda: target(1)),
        ("speculative", {"draft_length": 2}, lambda: Llama(FEATURE_DRAFT, rngs=nnx.Rngs(1))),
        ("self_speculative", {"layers": 1, "draft_length": 2}, None),
    ],
)
def test_functions_and_parameters_emit_the_tokens_of_their_module(name, options, draft):
    """The drafts are a model, a model that sees features, and the target's first layer."""
    method, modules = get_method(name, **options), (target(), draft() if draft else None)
    pair = [module and functional(module) for module in modules]
    out = generate(KEY, method, *pair, *PROMPTS)
    assert_same(out, generate(KEY, method, *modules, *PROMPTS))
    assert int(out.target_calls[0]) < 12


def test_check_model_accepts_functions_and_reports_those_with_other_arguments():
    check_model(functional(target()), layers=1)

    def no_layers(params, tokens, positions, visible, cache=None, pending=0):
        return extend(params, tokens, positions, visible, cache, pending)

    message = r"^model FunctionalModel: extend does not take \(tokens, .*layers=\): "
    with pytest.raises(AssertionError, match=message):
        check_model(table_model(extend_fn=no_layers))


def test_decode_and_stream_take_functions():
    model, method = table_model(), get_method("speculative", draft_length=2)
    arguments = np.array(PROMPTS[0], np.int32), np.array(PROMPTS[1], np.int32)
    expected = generate(KEY, method, model, model, *PROMPTS).tokens
    run = jax.jit(lambda *both: decode(KEY, method, *both, *arguments, 12).tokens)
    found = run(freeze(model), freeze(model))
    np.testing.assert_array_equal(found, np.asarray(expected)[:, : found.shape[1]])
    steps = stream(KEY, method, model, model, PROMPTS[0][0], 12)
    tokens = [token for step in steps for token in step.tokens]
    assert len(tokens) == 12


def test_other_parameters_compile_nothing(count_compilations):
    """Nor does an object that is made again of equal functions."""
    method = get_method("speculative", draft_length=2)
    first, second, third = (functional(target(seed)) for seed in (0, 1, 2))
    before = generate(KEY, method, first, second, *PROMPTS)
    with count_compilations() as compiled:
        after = generate(
            KEY, method, third, dataclasses.replace(first, params=second.params), *PROMPTS
        )
        jax.block_until_ready(after)
    assert not compiled
    assert not np.array_equal(before.tokens, after.tokens)


def test_the_digest_is_that_of_the_arrays():
    module, model = target(), functional(target())
    assert len(jax.tree.leaves(model)) == len(jax.tree.leaves(model.params))
    assert digest(model) == digest(module) == digest(dataclasses.replace(model, extend_fn=print))
    small = table_model()
    changed = [
        table_model(1),
        dataclasses.replace(small, params=small.params.astype(jnp.bfloat16)),
        dataclasses.replace(small, params=small.params.reshape(-1, V)),
        dataclasses.replace(small, params=(small.params, KEY)),
    ]
    assert len({digest(each) for each in (small, *changed)}) == 5


def test_functional_models_load_by_name_and_fit_other_vocabularies(monkeypatch):
    monkeypatch.setattr(by_name, "LOADERS", dict(by_name.LOADERS))
    tokenizer = load("random:2m").tokenizer
    register_loader("mine", lambda name, _: Trained(name, table_model(int(name)), tokenizer))
    pair = load("mine:0"), load("mine:1", "float32", sharding.make_mesh())
    assert isinstance(pair[1].model, FunctionalModel)
    assert quality._info("mine:0").parameters == V**3
    with pytest.raises(UserError, match="FunctionalModel has no int8 layers"):
        load("mine:0", "int8")
    wide = Trained("wide", TableModel(random_table(2, V + 2)), tokenizer)
    draft = fitted(pair[0], wide)
    assert isinstance(draft.model, SharedTokens) and draft.model.vocab_size == V + 2
    check_model(draft)
    method = get_method("speculative", draft_length=2)
    out = generate(KEY, method, wide, draft, *PROMPTS)
    alone = SharedTokens(TableModel(random_table(0, V)), np.arange(V + 2) < V)
    assert_same(out, generate(KEY, method, wide, alone, *PROMPTS))


@pytest.mark.slow
def test_parameters_on_a_mesh_stay_or_are_replicated():
    mesh, model = sharding.make_mesh(), table_model()
    split = NamedSharding(mesh, PartitionSpec(None, None, sharding.MODEL))
    placed = dataclasses.replace(model, params=jax.device_put(model.params, split))
    assert parallel.on_mesh(mesh, placed).leaves[0].sharding == split
    assert parallel.on_mesh(mesh, model).leaves[0].sharding.spec == PartitionSpec()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Own:
    """A pytree with the methods of a model, and with leaves that are not arrays."""

    table: Any
    key: jax.Array
    scale: float = 2.0
    activation: Any = jnp.tanh
    name: str = "own"
    vocab_size, context, layers = V, 64, 1

    def init_cache(self, batch, capacity):
        return init_cache(self.table, batch, capacity)

    def extend(self, *arguments, **options):
        logits, cache = extend(self.table, *arguments, **options)
        noise = self.activation(jax.random.normal(jax.random.clone(self.key), (V,)))
        return logits + self.scale * noise * (self.name == "own"), cache


def test_any_pytree_with_the_methods_of_a_model_is_a_model(count_compilations):
    method = get_method("baseline")

    def tokens(model):
        return np.asarray(generate(KEY, method, model, None, *PROMPTS).tokens)

    table = random_table(0, V)
    check_model(own := Own(table, jax.random.key(1)))
    frozen, before = freeze(own), tokens(own)
    with count_compilations() as compiled:
        other = tokens(Own(random_table(0, V), jax.random.key(2)))
    assert not compiled  # Arrays and keys are traced.
    table[:] = random_table(1, V)
    np.testing.assert_array_equal(tokens(frozen), before)
    for changed in (other, tokens(own), tokens(Own(random_table(0, V), jax.random.key(1), 9.0))):
        assert not np.array_equal(changed, before)
    merged = frozen.merge()
    assert (merged.scale, merged.activation, merged.name) == (2.0, jnp.tanh, "own")


def test_equinox_modules_are_models():
    equinox = pytest.importorskip("equinox", reason="pip install equinox")

    class Module(equinox.Module):
        table: jax.Array
        linear: equinox.nn.Linear
        activation: Any = jax.nn.relu
        vocab_size: int = V
        context: int = 64
        layers: int = 1

        def init_cache(self, batch, capacity):
            return init_cache(self.table, batch, capacity)

        def extend(self, *arguments, **options):
            logits, cache = extend(self.table, *arguments, **options)
            return self.activation(jax.vmap(jax.vmap(self.linear))(logits)), cache

    model = Module(jnp.asarray(random_table(0, V)), equinox.nn.Linear(V, V, key=KEY))
    check_model(model)
    method = get_method("otm_block", tree="2,1")
    out = generate(KEY, method, model, model, *PROMPTS)
    assert int(out.target_calls[0]) < 12
    with pytest.raises(UserError, match=r"extend_fn: a BoundMethod is not hashable .*; give"):
        table_model(extend_fn=model.extend)


class Unregistered(Own):
    pass


class Unhashable(dict):
    def __call__(self, *_):
        raise AssertionError


def _refused():
    no_features = "hidden_fn=None: must be a function of params and its arguments"
    return [
        (lambda: table_model(extend_fn=None), "extend_fn=None: must be a function"),
        (lambda: table_model(init_cache_fn=3), "init_cache_fn=3: must be a function"),
        (lambda: table_model(extend_fn=Unhashable()), "extend_fn: a Unhashable is not hashable"),
        (lambda: table_model(features_shown=4), no_features),
        (lambda: table_model(features_seen=4), no_features),
        (lambda: table_model(hidden_fn=len), "logits_fn=None: must be a function"),
        (
            lambda: table_model(hidden_fn=len, logits_fn=len),
            "features_shown=0, features_seen=0: one must be the width of a hidden state; set fea",
        ),
        (lambda: table_model(layers=0), "model FunctionalModel: needs a positive integer 'layers'"),
        (
            lambda: table_model(context=None),
            "model FunctionalModel: needs a .* 'context', not None",
        ),
        (lambda: Unregistered(0, 0), "model Unregistered: is not a pytree; register it"),
        (
            lambda: Own(random_table(0, V), KEY, name={1, 2}),
            "model Own: a part that is not an array: unhashable type: 'set'; make it hashable",
        ),
        (lambda: {"params": 1}, "a dict is not a model; give an nnx.Module, a FunctionalModel or"),
        (lambda: [table_model()], "a list is not a model"),  # It has a method `extend`.
        (lambda: None, "a NoneType is not a model"),
    ]


@pytest.mark.parametrize(("build", "message"), _refused())
def test_what_is_no_model_is_refused(build, message):
    with pytest.raises(UserError, match=f"^{message}") as error:
        generate(KEY, get_method("baseline"), build(), None, *PROMPTS)
    assert "\n" not in str(error.value)
