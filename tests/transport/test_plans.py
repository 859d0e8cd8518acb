"""Properties that all plans share. To test a new plan, add a line to PLANS."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import testing, transport
from spectr_jax.transport import iopt, kseq
from spectr_jax.utils.errors import UserError

pytestmark = pytest.mark.optimized
PLANS = {
    "maximal": {},
    "naive": {},
    "kseq": {},
    "kseq gamma=1.5": {"gamma": 1.5},
    "kseq gamma=k": {"gamma": None},
    "spectr+": {},
    "spectr++": {},
    "optimal_kseq": {},
    "otm": {},
    "recursive": {},
    "recursive_without_replacement": {},
    "greedy": {},
    "greedy_multipath": {},
    "race": {},
}

# The tests of a plan run in one process, where they share compiled programs. spectr+ and spectr++
# share some, too.
cases = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(name.replace("++", "+"))) for name in PLANS],
)
pmfs = pytest.mark.parametrize("pmf", testing.DISTRIBUTIONS)
ks = pytest.mark.parametrize("k", [1, 2, 3, 4])


def _pmf(name):
    p, q = testing.DISTRIBUTIONS[name]
    return np.asarray(p, float), np.asarray(q, float)


def _plan(name):
    return transport.get(name.split()[0], **PLANS[name])


@cases
@pmfs
@ks
def test_the_emitted_pmf_is_q_and_the_acceptance_exact(name, pmf, k):
    testing.check_emitted_pmf(_plan(name), *_pmf(pmf), k)


@cases
@pmfs
def test_select_draws_from_pmf(name, pmf):
    testing.check_select(_plan(name), *_pmf(pmf), least=1e-4)


@cases
def test_the_bonus_token_is_the_choice_without_drafts(name):
    """So a sequence does not depend on whether a call drafts nothing or has no valid draft."""
    plan, (p, q), none = (
        _plan(name),
        np.random.default_rng(0).dirichlet(np.ones(100), 2),
        np.zeros(2),
    )

    @jax.jit
    @jax.vmap
    def both(key):
        same, none_valid = jax.random.clone(key), jnp.zeros(2, bool)
        chosen = plan.choose(same, jnp.float32(p), jnp.float32(q), jnp.int32(none), none_valid)
        return plan.bonus(key, jnp.float32(q)), chosen

    bonus, chosen = both(jax.random.split(jax.random.key(0), 20))
    np.testing.assert_array_equal(bonus, chosen)
    assert len(np.unique(bonus)) > 5


@cases
def test_invalid_input_under_jit_never_emits_impossible_tokens(name):
    """`Plan.select` documents how jitted calls treat arguments that raise errors outside jit."""
    testing.check_nonsense(_plan(name))


@cases
def test_matrix_products_never_use_the_default_precision(name):
    testing.check_precision(_plan(name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": [0.5, 0.4]}, r"p: sums to 0\.9, not 1"),
        ({"q": [0.5, 0.7]}, r"q: sums to 1\.2, not 1"),
        ({"p": [1.1, -0.1]}, r"p\[1\]=-0\.1"),
        ({"q": [np.nan, 1.0]}, r"q\[0\]=nan"),
        ({"q": [0.2, 0.3, 0.5]}, "p has 2 tokens and q has 3"),
        ({"p": [[0.5, 0.5]]}, r"p: has shape \(1, 2\)"),
        ({"p": [1.0, 0.0], "drafts": [1]}, "draft=1: has p = 0"),
        ({"drafts": [2]}, r"draft=2: .*0\.\.1"),
        ({"drafts": []}, r"drafts=\(\)"),
    ],
)
def test_bad_arguments_are_refused_outside_jit(change, message):
    arguments = {"p": [0.5, 0.5], "q": [0.5, 0.5], "drafts": [0], **change}
    plan = transport.get("kseq")
    with pytest.raises(UserError, match=message):
        plan.pmf(**arguments)
    drafts = np.array(arguments.pop("drafts") or [0], np.int32)
    with pytest.raises(UserError, match=message):
        plan.select(
            jax.random.key(0),
            **arguments,
            drafts=drafts,
            valid=np.full(len(drafts), change.get("drafts") != []),
        )


def test_bad_k_gamma_and_impossible_drafts_are_refused():
    half = [0.5, 0.5]
    for k in (0, 1.5, math.inf, math.nan, True, "2"):
        with pytest.raises(UserError, match=f"k={k}: "):
            transport.get("otm").acceptance(half, half, k)
    with pytest.raises(UserError, match=r"gamma=0\.5: "):
        transport.get("kseq", gamma=0.5).acceptance(half, half, 2)
    with pytest.raises(UserError, match=r"drafts=\(0, 0\): "):
        transport.get("recursive_without_replacement").pmf(half, half, (0, 0))
    with pytest.raises(UserError, match=r"drafts=\(1, 0\): "):
        transport.get("greedy").pmf([0.5, 0.2, 0.3], [0.5, 0.2, 0.3], (1, 0))


@pytest.mark.parametrize(
    ("name", "V", "k", "message"),
    [
        ("optimal_kseq", 11, 4, "V=11, k=4: .*44 .*40"),
        ("recursive_without_replacement", 300, 4, r"V=300, k=4: .*300\^3"),
    ],
)
def test_too_large_a_problem_is_refused_with_its_size(name, V, k, message):
    pmf = np.full(V, 1 / V)
    with pytest.raises(UserError, match=message):
        transport.get(name).acceptance(pmf, pmf, k)


@functools.partial(jax.jit, static_argnums=0)
def _tokens(plan, key, p, q, draft):
    keys = jax.random.split(key, 40_000)
    return jax.vmap(lambda key: plan.select(key, p, q, draft, jnp.ones(1, bool)).token)(keys)


@pmfs
@pytest.mark.parametrize("name", ["kseq", "otm"])
@pytest.mark.xdist_group("one draft")  # They share programs.
def test_plans_for_one_draft_equal_maximal_coupling(pmf, name):
    p, q = (jnp.float32(np.pad(part, (0, 6 - len(part)))) for part in _pmf(pmf))
    draft = jnp.argmax(p)[None].astype(jnp.int32)
    tokens = [
        _tokens(transport.get(plan), jax.random.key(0), p, q, draft) for plan in ("maximal", name)
    ]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-30])
def test_optimal_gamma_is_accurate_when_supports_barely_overlap(scale):
    """As beta tends to 0, gamma* tends to k."""
    p, q = jnp.float32([1.0, scale]), jnp.float32([scale, 1.0])
    gamma = kseq.optimal_gamma(p / p.sum(), q / q.sum(), jnp.int32(3), 3)
    exact = kseq.optimal_gamma_exact(
        np.array([1, scale]) / (1 + scale), np.array([scale, 1]) / (1 + scale), 3
    )
    assert float(gamma) == pytest.approx(exact, rel=1e-5)
    assert 1 <= float(gamma) <= 3


@ks
@pmfs
def test_kseq_acceptance_is_at_least_its_pass_probability(pmf, k):
    p, q = _pmf(pmf)
    plan = kseq.KSeq()
    passes = iopt.accept_probability(p, q, plan.stages(p, q, k))
    assert plan.acceptance(p, q, k) >= passes - 1e-12


def test_unknown_plans_and_options_are_refused():
    with pytest.raises(UserError, match=r"unknown plan 'k-seq'; did you mean 'kseq'\?"):
        transport.get("k-seq")
    with pytest.raises(UserError, match="plan 'maximal' has no option 'gamma'"):
        transport.get("maximal", gamma=2.0)


def test_a_factory_can_pass_options_on(monkeypatch):
    monkeypatch.setattr(transport, "PLANS", dict(transport.PLANS))
    transport.register("mine", lambda **options: transport.get("kseq", **options))
    assert transport.get("mine", gamma=2.0) == kseq.KSeq(2.0)
    with pytest.raises(UserError, match="plan 'kseq' has no option 'w'"):
        transport.get("mine", w=2.0)


def test_equal_plans_hash_alike():
    assert transport.get("kseq") == transport.get("kseq")
    assert hash(transport.get("kseq")) == hash(transport.get("kseq"))
