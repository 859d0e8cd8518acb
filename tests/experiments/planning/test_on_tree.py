"""Tests which trees a method is found to draft, and with which options."""

import functools

import pytest

from spectr_jax import decoding
from spectr_jax.decoding import methods
from spectr_jax.decoding.tree import batch, chain, iid_chains, none, parse
from spectr_jax.experiments.planning.on_tree import cannot_branch, on_tree, options_for
from spectr_jax.utils.errors import UserError


@pytest.fixture(autouse=True)
def _registered_here_only(monkeypatch):
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))


@pytest.mark.parametrize(
    ("name", "tree", "options"),
    [
        ("otm", parse("2,2,1"), {"tree": parse("2,2,1")}),
        ("gsd", chain(3), {"tree": chain(3)}),
        ("gbv", iid_chains(3, 2), {"num_drafts": 3, "draft_length": 2}),
        ("gbv", parse("1,2"), None),
        ("block", chain(5), {"draft_length": 5}),
        ("block", batch(2), None),
        ("baseline", none(), {}),
        ("baseline", chain(1), None),
        ("otm", none(), None),
        ("self_speculative", chain(2), {"draft_length": 2}),
        ("self_speculative", batch(2), None),
        ("own_layers", batch(2), {"tree": batch(2)}),
        ("fixed", parse("2,1"), {}),
        ("fixed", chain(1), None),
    ],
)
def test_the_options_of_a_factory_decide_which_trees_a_method_drafts(name, tree, options):
    own_layers = functools.partial(methods.self_speculative, method="otm")
    decoding.register("own_layers", own_layers)
    decoding.register("fixed", lambda: decoding.get_method("otm", tree="2,1"))
    assert options_for(name, tree) == options
    method = on_tree(name, tree)
    assert method == (None if options is None else decoding.get_method(name, **options))
    assert method is None or method.tree == tree
    if tree == batch(2):
        assert cannot_branch(name) == (options is None)


def test_a_verifier_that_refuses_a_tree_is_no_error():
    multi_path = decoding.get_method("gbv").verifier
    decoding.register("strict", lambda *, tree="2": decoding.Method("", parse(tree), multi_path))
    assert options_for("strict", parse("1,2")) is None
    assert options_for("strict", iid_chains(2, 2)) == {"tree": iid_chains(2, 2)}


def test_unknown_methods_are_refused():
    with pytest.raises(UserError, match="unknown method 'ot'"):
        options_for("ot", chain(1))
