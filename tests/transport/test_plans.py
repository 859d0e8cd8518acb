"""One table of plans x laws: a new plan is tested by adding a line to PLANS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from spectr_jax import transport
from spectr_jax.errors import UserError
from spectr_jax.transport import kseq, race
from spectr_jax.transport.enumeration import draft_tuples, emitted_law

PLANS = {
    "maximal": {},
    "naive": {},
    "kseq": {},
    "kseq_gamma": {},
    "kseq_gamma gamma=1.5": {"gamma": 1.5},
    "spectr+": {},
    "spectr++": {},
    "optimal_kseq": {},
    "otm": {},
    "otm_lp": {},
    "recursive": {},
    "recursive_without_replacement": {},
    "greedy": {},
    "greedy_multipath": {},
    "race": {},
}
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

# The tests of a plan run in one process, and share its compiled programs.
cases = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in PLANS])
laws = pytest.mark.parametrize("law", LAWS)
ks = pytest.mark.parametrize("k", DRAFTS)


def _law(name):
    p, q = LAWS[name]
    return np.asarray(p, float), np.asarray(q, float)


def _plan(name):
    return transport.get(name.split()[0], **PLANS[name])


@cases
@laws
@ks
def test_emitted_law_is_q_and_acceptance_exact_by_enumeration(name, law, k):
    p, q = _law(law)
    plan = _plan(name)
    emitted, accepted = emitted_law(plan, p, q, k)
    np.testing.assert_allclose(emitted, q, rtol=0, atol=1e-9)
    assert plan.acceptance(p, q, k) == pytest.approx(accepted, abs=1e-9)


@functools.partial(jax.jit, static_argnums=0)
def _choices(plan, key, p, q, drafts, valid):
    """Choices [DRAWS], and for each whether it is one for these drafts: a race draws its own, with the key."""

    def choose(key):
        if plan.drafts != "race":
            return plan.select(key, p, q, drafts, valid), True
        place = jnp.cumsum(valid) - 1
        raced = race.arrivals(jax.random.fold_in(key, 0), p, len(valid))[place]
        choice = plan.select(jax.random.fold_in(key, 0), p, q, jnp.where(valid, raced, drafts), valid)
        return choice, jnp.all(~valid | (raced == drafts))

    return jax.vmap(choose)(jax.random.split(key, DRAWS))


@cases
@laws
def test_select_draws_from_law(name, law):
    # One vocabulary for all laws, so that a plan is compiled once.
    p, q = (np.pad(part, (0, 6 - len(part))) for part in _law(law))
    plan = _plan(name)
    rng = np.random.default_rng(1)
    valid_of = {0: [False] * 3, 1: [False, True, False], 2: [True, False, True], 3: [True] * 3}
    for live, valid in valid_of.items():  # The number of drafts is traced: one program for all.
        possible = list(draft_tuples(p, live, plan.drafts)) if live else [((), 1.0)]
        drafts = possible[rng.choice(len(possible), p=[weight for _, weight in possible])][0]
        valid = np.array(valid) & (np.cumsum(valid) <= len(drafts))
        padded = np.full(3, np.argmax(p))
        padded[valid] = drafts
        choices, mine = _choices(plan, jax.random.key(live), jnp.float32(p), jnp.float32(q), jnp.int32(padded), valid)
        tokens, accepted = np.asarray(choices.token)[mine], np.asarray(choices.accepted)[mine]
        assert len(tokens) > 100
        exact = plan.law(p, q, drafts) if drafts else q
        counts = np.bincount(tokens, minlength=len(q))
        assert not counts[q == 0].any(), "a token of probability 0 was emitted"
        _assert_drawn_from(counts, exact)
        np.testing.assert_array_equal(accepted, np.isin(tokens, drafts))


def _assert_drawn_from(counts, law):
    seen = law > 1e-12
    assert counts[~seen].sum() <= 2e-4 * counts.sum()  # What float32 rounding may add.
    if seen.sum() > 1:
        expected = law[seen] / law[seen].sum() * counts[seen].sum()
        assert scipy.stats.chisquare(counts[seen], expected).pvalue > 1e-4


@cases
def test_nonsense_under_jit_never_emits_a_token_without_probability(name):
    """What raises outside jit has a documented behaviour under it: see `Plan.select`."""
    plan = _plan(name)
    rng = np.random.default_rng(2)
    select = jax.jit(jax.vmap(plan.select))
    n, V, k = 64, 6, 3
    p, q = rng.dirichlet(np.ones(V), n), rng.dirichlet(np.ones(V), n)
    for law in (p, q):
        law[rng.random(law.shape) < 0.2] = 0
        law[rng.random(law.shape) < 0.1] = np.nan
        law[rng.random(law.shape) < 0.1] *= -3
    p[0], q[1] = 0, np.nan
    drafts, valid = rng.integers(-2, V + 2, (n, k)), rng.random((n, k)) < 0.7
    choices = select(jax.random.split(jax.random.key(0), n), jnp.float32(p), jnp.float32(q), jnp.int32(drafts), valid)
    for row in range(n):
        token = int(choices.token[row])
        assert (q[row, token] > 0) if (q[row] > 0).any() else token == -1
        usable = [x for x, ok in zip(drafts[row], valid[row], strict=True) if ok and 0 <= x < V and p[row, x] > 0]
        assert bool(choices.accepted[row]) == (token in usable)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": [0.5, 0.4]}, r"p sums to 0\.9, not 1; divide it by its sum"),
        ({"q": [0.5, 0.7]}, r"q sums to 1\.2, not 1"),
        ({"p": [1.1, -0.1]}, r"p\[1\] is -0\.1.*; probabilities are finite and at least 0"),
        ({"q": [np.nan, 1.0]}, r"q\[0\] is nan"),
        ({"q": [0.2, 0.3, 0.5]}, "p has 2 tokens and q has 3; use one vocabulary for both"),
        ({"p": [[0.5, 0.5]]}, r"p has shape \(1, 2\); give one law \[V\]"),
        ({"p": [1.0, 0.0], "drafts": [1]}, "draft 1 has p = 0; give drafts that were drawn from p"),
        ({"drafts": [2]}, r"draft 2 is outside the vocabulary 0\.\.1"),
        ({"drafts": []}, "k=0: no valid draft; give at least one"),
    ],
)
def test_bad_arguments_outside_jit(change, message):
    arguments = {"p": [0.5, 0.5], "q": [0.5, 0.5], "drafts": [0], **change}
    plan = transport.get("kseq")
    with pytest.raises(UserError, match=message):
        plan.law(**arguments)
    drafts = np.array(arguments.pop("drafts") or [0], np.int32)
    with pytest.raises(UserError, match=message):
        plan.select(jax.random.key(0), **arguments, drafts=drafts, valid=np.full(len(drafts), change.get("drafts") != []))


def test_bad_arguments_of_acceptance_and_of_plans():
    half = [0.5, 0.5]
    with pytest.raises(UserError, match="k=0 drafts; give a whole number of at least 1"):
        transport.get("otm").acceptance(half, half, 0)
    with pytest.raises(UserError, match=r"k=1\.5 drafts"):
        transport.optimal_acceptance(half, half, 1.5)
    with pytest.raises(UserError, match=r"gamma=0\.5 is not at least 1"):
        transport.get("kseq_gamma", gamma=0.5).acceptance(half, half, 2)
    with pytest.raises(UserError, match=r"drafts \(0, 0\) repeat a token"):
        transport.get("recursive_without_replacement").law(half, half, (0, 0))
    with pytest.raises(UserError, match=r"drafts \(1,\) are not the 1 likeliest tokens of p; draft greedily"):
        transport.get("greedy").law([0.5, 0.2, 0.3], [0.5, 0.2, 0.3], (1, 0))


@pytest.mark.parametrize(
    ("name", "V", "k", "message"),
    [
        ("otm_lp", 100, 4, r"has 16,180,000 flow variables, more than 1,000,000; use plan 'otm'"),
        ("optimal_kseq", 11, 4, "has 44 binary variables, more than 40"),
        ("recursive_without_replacement", 300, 4, r"V\^\(k-1\) = 300\^3 sequences"),
    ],
)
def test_too_large_a_problem_is_refused_with_its_size(name, V, k, message):
    law = np.full(V, 1 / V)
    with pytest.raises(UserError, match=message):
        transport.get(name).acceptance(law, law, k)


def test_theorem_1_bound_of_too_many_subsets_is_refused():
    with pytest.raises(UserError, match="Theorem 1's bound for 20 tokens and k=4 has 9,285,140,480 terms"):
        transport.theorem_1_bound(np.full(20, 0.05), np.full(20, 0.05), 4)


@laws
@pytest.mark.parametrize("name", ["kseq", "otm"])
def test_one_draft_is_maximal_coupling_draw_for_draw(law, name):
    p, q = (jnp.float32(np.pad(part, (0, 6 - len(part)))) for part in _law(law))
    draft = jnp.argmax(p)[None].astype(jnp.int32)
    tokens = [
        _choices(transport.get(plan), jax.random.key(0), p, q, draft, jnp.ones(1, bool))[0].token
        for plan in ("maximal", name)
    ]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-30])
def test_kseq_gamma_when_supports_nearly_part(scale):
    """beta -> 0: gamma* -> k, and the residual stays a law."""
    p, q = jnp.float32([1.0, scale]), jnp.float32([scale, 1.0])
    gamma = kseq.optimal_gamma(p / p.sum(), q / q.sum(), jnp.int32(3), 3)
    exact = kseq.optimal_gamma_exact(np.array([1, scale]) / (1 + scale), np.array([scale, 1]) / (1 + scale), 3)
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
