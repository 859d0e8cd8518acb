"""One table of plans x laws: a new plan is tested by adding a line to PLANS."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from spectr_jax import transport
from spectr_jax.errors import UserError
from spectr_jax.transport import kseq

PLANS = ["maximal", "kseq", "otm"]

_RNG = np.random.default_rng(0)
LAWS = {
    "uniform": ([0.25] * 4, [0.25] * 4),
    "bernoulli": ([0.75, 0.25], [0.4, 0.6]),
    "dirichlet": (_RNG.dirichlet(np.ones(5)), _RNG.dirichlet(np.ones(5))),
    "rough": (_RNG.dirichlet(np.full(6, 0.3)), _RNG.dirichlet(np.full(6, 0.3))),
    "disjoint": ([0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
    "equal": ([0.1, 0.2, 0.7], [0.1, 0.2, 0.7]),
    "q with zeros": ([0.2, 0.3, 0.5], [0.0, 0.6, 0.4]),
    "p with zeros": ([0.0, 0.6, 0.4], [0.2, 0.3, 0.5]),
    "one-hot p": ([0.0, 1.0, 0.0], [0.2, 0.3, 0.5]),
    "one-hot q": ([0.2, 0.3, 0.5], [0.0, 0.0, 1.0]),
    "same one-hot": ([0.0, 1.0], [0.0, 1.0]),
    "other one-hot": ([0.0, 1.0], [1.0, 0.0]),
}
DRAFTS = [1, 2, 3, 4]
DRAWS = 40_000

cases = pytest.mark.parametrize("name", PLANS)
laws = pytest.mark.parametrize("law", LAWS)
ks = pytest.mark.parametrize("k", DRAFTS)


def _law(name):
    p, q = LAWS[name]
    return np.asarray(p, float), np.asarray(q, float)


def _draft_sets(p, k):
    """All drafts of positive probability, with it."""
    for drafts in itertools.product(range(len(p)), repeat=k):
        probability = np.prod(p[list(drafts)])
        if probability > 0:
            yield drafts, probability


@cases
@laws
@ks
def test_emitted_law_is_q_by_enumeration(name, law, k):
    p, q = _law(law)
    plan = transport.get(name)
    emitted = sum(weight * plan.law(p, q, drafts) for drafts, weight in _draft_sets(p, k))
    np.testing.assert_allclose(emitted, q, rtol=0, atol=1e-9)


@cases
@laws
@ks
def test_acceptance_is_the_enumerated_one(name, law, k):
    p, q = _law(law)
    plan = transport.get(name)
    enumerated = sum(w * plan.law(p, q, drafts)[list(set(drafts))].sum() for drafts, w in _draft_sets(p, k))
    assert plan.acceptance(p, q, k) == pytest.approx(enumerated, abs=1e-9)


@functools.partial(jax.jit, static_argnums=0)
def _histogram(plan, key, p, q, drafts, valid):
    choices = jax.vmap(lambda k: plan.select(k, p, q, drafts, valid))(jax.random.split(key, DRAWS))
    return jnp.bincount(choices.token, length=p.shape[0]), choices.accepted, choices.token


@cases
@laws
def test_select_draws_from_law(name, law):
    p, q = _law(law)
    plan = transport.get(name)
    k = 3
    drafts = np.random.default_rng(1).choice(len(p), k, p=p)
    for live in (0, 1, k):  # The number of drafts is traced: one program for all.
        valid = np.arange(k) < live
        counts, accepted, tokens = _histogram(
            plan, jax.random.key(live), jnp.float32(p), jnp.float32(q), jnp.int32(drafts), valid
        )
        exact = plan.law(p, q, tuple(drafts[:live])) if live else q
        assert not np.any(np.asarray(counts)[q == 0]), "a token of probability 0 was emitted"
        _assert_drawn_from(np.asarray(counts), exact)
        np.testing.assert_array_equal(accepted, np.isin(tokens, drafts[:live]))


def _assert_drawn_from(counts, law):
    seen = law > 1e-12
    assert counts[~seen].sum() <= 2e-4 * counts.sum()  # What float32 rounding may add.
    if seen.sum() > 1:
        expected = law[seen] / law[seen].sum() * counts[seen].sum()
        assert scipy.stats.chisquare(counts[seen], expected).pvalue > 1e-4


@laws
def test_kseq_with_one_draft_is_maximal_coupling(law):
    p, q = (jnp.float32(part) for part in _law(law))
    draft = jnp.argmax(p)[None].astype(jnp.int32)
    valid = jnp.ones(1, bool)
    tokens = [_histogram(transport.get(name), jax.random.key(0), p, q, draft, valid)[2] for name in ("maximal", "kseq")]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-30])
def test_kseq_gamma_when_supports_nearly_part(scale):
    """beta -> 0: gamma* -> k, and the residual stays a law."""
    p, q = jnp.float32([1.0, scale]), jnp.float32([scale, 1.0])
    gamma = kseq._gamma(p / p.sum(), q / q.sum(), jnp.int32(3), 3)
    exact = kseq._exact(np.array([1, scale]) / (1 + scale), np.array([scale, 1]) / (1 + scale), 3)[0]
    assert float(gamma) == pytest.approx(exact, rel=1e-5)
    assert 1 <= float(gamma) <= 3


@pytest.mark.parametrize(("r", "k"), [(2, 2), (3, 4), (10, 8)])
def test_kseq_is_optimal_on_uniform_laws(r, k):
    """SpecTr, appendix D.1: p = U(d), q = U(d / r) accepts with probability 1 - (1 - 1 / r)^k."""
    d = 6 * r
    p, q = np.full(d, 1 / d), np.where(np.arange(d) < d // r, r / d, 0.0)
    assert kseq.accept_probability(p, q, k) == pytest.approx(1 - (1 - 1 / r) ** k, abs=1e-9)
    assert transport.get("kseq").acceptance(p, q, k) == pytest.approx(1 - (1 - 1 / r) ** k, abs=1e-9)


@ks
@laws
def test_kseq_acceptance_is_at_least_p_acc(law, k):
    p, q = _law(law)
    assert transport.get("kseq").acceptance(p, q, k) >= kseq.accept_probability(p, q, k) - 1e-12


def test_unknown_plan_and_option():
    with pytest.raises(UserError, match=r"unknown plan 'k-seq'; did you mean 'kseq'\?"):
        transport.get("k-seq")
    with pytest.raises(UserError, match="plan 'maximal' has no option 'gamma'"):
        transport.get("maximal", gamma=2.0)


def test_equal_plans_hash_alike():
    assert transport.get("kseq") == transport.get("kseq")
    assert hash(transport.get("kseq")) == hash(transport.get("kseq"))
