"""The optimal plan equals the linear program; plans, bounds and examples agree with the papers."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import transport
from spectr_jax.testing import chi_square
from spectr_jax.testing.plans import emitted_pmf
from spectr_jax.transport import draws, iopt, kseq, otm, race
from spectr_jax.transport.kseq import KSeq
from spectr_jax.transport.spectr_plus_plus import SpecTrPlus, SpecTrPlusPlus
from spectr_jax.utils.errors import UserError

pytestmark = pytest.mark.optimized
TOLERANCE = 1e-9


def _random_pairs(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        V, k = int(rng.choice([2, 3, 5, 8])), int(rng.integers(1, 5))
        p, q = rng.dirichlet(np.full(V, rng.choice([0.2, 0.5, 1.0, 5.0])), 2)
        yield p, q, k


def _linear_program(p, q, k):
    """Returns alpha_k as the optimum of SpecTr's problem (4).

    The variables are the accepted masses f(S, y) of the tokens y of each set S of drafts.
    """
    masses = collections.Counter()
    for drafts in itertools.product(np.flatnonzero(p).tolist(), repeat=k):
        masses[frozenset(drafts)] += np.prod(p[list(drafts)])
    pairs = [(row, token) for row, drafts in enumerate(masses) for token in drafts]
    limits = np.zeros((len(masses) + len(q), len(pairs)))
    for column, (row, token) in enumerate(pairs):
        limits[[row, len(masses) + token], column] = 1
    bounds = np.append(list(masses.values()), q)
    return iopt.minimise(-np.ones(len(pairs)), limits, bounds).sum()


def _pass_probability(plan, p, q, k):
    return iopt.accept_probability(p, q, plan.stages(p, q, k))


@pytest.mark.parametrize("part", range(4))
def test_plans_are_ordered_by_acceptance_on_random_pairs(part):
    """Checks LP = exact = closed form >= SpecTr++ >= SpecTr+ >= K-SEQ >= (1 - 1/e) LP.

    The order holds for the acceptance and for the probability that a draft passes.
    """
    for p, q, k in itertools.islice(_random_pairs(200), part, None, 4):
        best = _linear_program(p, q, k)
        assert transport.get("otm").acceptance(p, q, k) == pytest.approx(best, abs=TOLERANCE)
        assert transport.optimal_acceptance(p, q, k) == pytest.approx(best, abs=TOLERANCE)
        names = "spectr++", "spectr+", "kseq"
        accepted = [transport.get(name).acceptance(p, q, k) for name in names]
        plans = SpecTrPlusPlus(), SpecTrPlus(), KSeq()
        for chain in (accepted, [_pass_probability(plan, p, q, k) for plan in plans]):
            for better, worse in itertools.pairwise([best, *chain]):
                assert better >= worse - TOLERANCE, (p, q, k, chain)
            assert chain[-1] >= (1 - 1 / np.e) * best


@pytest.mark.parametrize("part", range(2))
def test_the_device_simplex_equals_the_full_linear_program(part):
    """`simplex` with only k + 1 token constraints equals HiGHS with all of them (Theorem 2)."""
    for p, q, k in itertools.islice(_random_pairs(120), part, None, 2):
        ps = np.tile(p, (k, 1))
        start = iopt.saturated_subsets(ps, q)
        for plan, limit in ((SpecTrPlus(), 1), (SpecTrPlusPlus(), None)):
            reference = iopt.accept_probability(ps, q, iopt.iopt(ps, q, start, limit))
            assert _pass_probability(plan, p, q, k) == pytest.approx(reference, abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_iopt_is_exact_and_improves_with_each_iteration(seed):
    """Each draft has its own p. Each iteration improves the plan (SpecTr++, Theorem 3)."""
    rng = np.random.default_rng(seed)
    ps, q = rng.dirichlet(np.ones(5), 3), rng.dirichlet(np.ones(5))
    reached = []
    for iterations in (1, 2, None):
        stages = iopt.iopt(ps, q, iopt.saturated_subsets(ps, q), iterations)
        emitted, accepted = np.zeros(5), 0.0
        for drafts in itertools.product(range(5), repeat=3):
            weight = np.prod(ps[np.arange(3), drafts])
            pmf = iopt.pmf(ps, q, drafts, stages)
            emitted += weight * pmf
            accepted += weight * pmf[list(set(drafts))].sum()
        np.testing.assert_allclose(emitted, q, atol=TOLERANCE)
        assert iopt.acceptance(ps, q, stages) == pytest.approx(accepted, abs=TOLERANCE)
        reached.append(iopt.accept_probability(ps, q, stages))
    assert reached == sorted(reached)


@pytest.mark.parametrize("seed", range(4))
def test_optimal_kseq_is_the_best_of_all_subsets(seed):
    rng = np.random.default_rng(seed)
    p, q, k = rng.dirichlet(np.full(4, 0.7)), rng.dirichlet(np.full(4, 0.7)), 2
    ps = np.tile(p, (k, 1))
    best = 0.0
    for subsets in itertools.product(itertools.product((False, True), repeat=4), repeat=k):
        try:
            stages = iopt.Stages(iopt.best_alphas(ps, q, np.array(subsets)), np.array(subsets))
        except RuntimeError:  # The linear program of these subsets is infeasible.
            continue
        best = max(best, iopt.accept_probability(ps, q, stages))
    found = transport.get("optimal_kseq")
    assert found.acceptance(p, q, k) >= best - TOLERANCE
    assert _pass_probability(SpecTrPlusPlus(), p, q, k) <= best + TOLERANCE


@functools.partial(jax.jit, static_argnums=(1, 4, 5))
def _simulate(key, choose, p, q, k, count):
    def one(key):
        draft_key, choose_key = jax.random.split(key)
        # `Plan.select` counts valid drafts in each draw, so draws would share no computation.
        drafts = draws.draw(draft_key, p, (k,))
        token = choose(choose_key, p, q, drafts, jnp.ones(k, bool))
        return token, jnp.any(drafts == token)

    # The distributions of 50 draws fit in the CPU's cache.
    tokens, accepted = jax.lax.map(one, jax.random.split(key, count), batch_size=50)
    return jnp.bincount(tokens, length=len(q)), jnp.sum(accepted)


def _assert_pmf_is(counts, q):
    """Tests counts against q by chi-square."""
    assert not counts[q == 0].any()
    assert chi_square.p_value(counts, q) > 1e-3


def _noisy_zipf(V, seed):
    rng = np.random.default_rng(seed)
    weights = np.exp(rng.normal(size=(2, V))) / np.arange(1, V + 1)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["otm", "kseq", "spectr++"])
def test_float32_select_follows_q_at_vocabulary_8192(name):
    """The acceptance is exact within four standard errors."""
    p, q = _noisy_zipf(8192, 0)
    k, chunk = 4, 2_000
    chunks = 150 if name == "otm" else 50
    plan = transport.get(name)
    counts, accepted = np.zeros(8192), 0
    for index in range(chunks):
        key = jax.random.fold_in(jax.random.key(0), index)
        part, hits = _simulate(key, plan.choose, jnp.float32(p), jnp.float32(q), k, chunk)
        counts += np.asarray(part)
        accepted += int(hits)
    _assert_pmf_is(counts, q)
    exact = plan.acceptance(p, q, k)
    error = 4 * np.sqrt(exact * (1 - exact) / counts.sum())
    assert accepted / counts.sum() == pytest.approx(exact, abs=error)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bits", [0, 6])
def test_otm_is_exact_with_cells_of_any_width(monkeypatch, bits, seed):
    """Without a sort, tokens follow q even if a cell is an octave wide (0 bits).

    With 6 bits the acceptance is also optimal.
    """
    monkeypatch.setattr(otm, "SORTED", 0)
    monkeypatch.setattr(otm, "BITS", bits)
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(8, 0.5)), rng.dirichlet(np.full(8, 0.5))
    count, k = 400_000 if bits == 0 else 50_000, 3

    def choose(*arguments):  # A new function makes jit trace again.
        return otm.OTM().choose(*arguments)

    pmfs = jnp.float32(p), jnp.float32(q)
    counts, accepted = _simulate(jax.random.key(seed), choose, *pmfs, k, count)
    _assert_pmf_is(np.asarray(counts), q)
    exact = otm.acceptance(p, q, k)
    error = 4 * np.sqrt(exact * (1 - exact) / count)
    assert accepted / count < exact + error
    if bits == 6:
        assert accepted / count > exact - error


@pytest.mark.parametrize("V", [500, 8192])
def test_float32_optimal_acceptance_equals_float64(V):
    p, q = _noisy_zipf(V, 1)
    measure = jax.jit(otm.acceptance)
    for k in (1, 2, 8, 32):
        assert float(measure(jnp.float32(p), jnp.float32(q), k)) == pytest.approx(
            transport.optimal_acceptance(p, q, k), abs=2e-5
        )


def test_the_bernoulli_example_has_the_published_values():
    """Checks SpecTr++, Example 1: Ber(0.5) to Ber(0.75) with two drafts."""
    p, q = np.array([0.5, 0.5]), np.array([0.25, 0.75])
    assert kseq.optimal_gamma_exact(p, q, 2) == pytest.approx(1.30902, abs=1e-5)
    assert 1 - _pass_probability(KSeq(), p, q, 2) == pytest.approx(0.0955, abs=1e-4)
    assert transport.optimal_acceptance(p, q, 2) == pytest.approx(1)
    assert _pass_probability(SpecTrPlus(), p, q, 2) == pytest.approx(1)
    np.testing.assert_allclose(SpecTrPlus().stages(p, q, 2).alphas, [0, 2], atol=1e-12)


@pytest.mark.parametrize(("p", "q"), [(0.25, 0.1), (0.25, 0.9), (0.5, 0.75), (0.25, 0.25)])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_bernoulli_acceptance_equals_the_closed_form(p, q, k):
    """Checks the closed form of SpecTr, Appendix B.2."""
    closed = min(q, 1 - (1 - p) ** k) + min(1 - q, 1 - p**k)
    assert transport.optimal_acceptance([1 - p, p], [1 - q, q], k) == pytest.approx(
        closed, abs=1e-12
    )


@pytest.mark.parametrize(("r", "k"), [(2, 2), (3, 4), (10, 8)])
def test_plans_are_optimal_between_uniform_distributions(r, k):
    """K-SEQ is optimal from U(d) to U(d / r) (SpecTr, Appendices B.2 and D.1)."""
    d = 60  # One vocabulary, and so one program, for all r.
    p, q = np.full(d, 1 / d), np.where(np.arange(d) < d // r, r / d, 0.0)
    exact = pytest.approx(1 - (1 - 1 / r) ** k, abs=1e-9)
    assert _pass_probability(KSeq(), p, q, k) == exact
    for name in ("kseq", "spectr+", "spectr++", "otm"):
        assert transport.get(name).acceptance(p, q, k) == exact


def test_plans_solve_the_three_token_example():
    """Token 0 is accepted with probability 2/3, token 1 always; a rejection emits token 1."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.4, 0.5, 0.1])
    for name in ("maximal", "kseq", "otm", "spectr++", "recursive"):
        plan = transport.get(name)
        np.testing.assert_allclose(plan.pmf(p, q, [0]), [2 / 3, 1 / 3, 0], atol=1e-12)
        np.testing.assert_allclose(plan.pmf(p, q, [1]), [0, 1, 0], atol=1e-12)
        np.testing.assert_allclose(plan.pmf(q, p, [1]), [0.4, 0.6, 0], atol=1e-12)  # From q to p.


def test_the_acceptance_of_one_draft_is_the_overlap():
    for p, q, _ in itertools.islice(_random_pairs(60), 0, None, 3):
        overlap = np.minimum(p, q).sum()
        assert transport.optimal_acceptance(p, q, 1) == pytest.approx(overlap, abs=TOLERANCE)


def test_optimal_acceptance_tends_to_the_mass_that_p_covers():
    """Its limit for large k is the mass of q on the support of p (SpecTr, Lemma 1)."""
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.2, 0.5, 0.3])
    values = [transport.optimal_acceptance(p, q, k) for k in (1, 2, 4, 8, 100)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(0.7)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_race_acceptance_is_within_the_bounds_of_lemma_3_1(part):
    """Enumeration and a closed form give the exact acceptance of one race (ERSD, Lemma 3.1)."""
    plan = transport.get("race")
    for p, q, _ in itertools.islice(_random_pairs(200), part, None, 2):
        _, accepted = emitted_pmf(plan, p, q, 1)
        both = (p > 0) & (q > 0)
        closed = np.sum(1 / np.maximum(p / p[both, None], q / q[both, None]).sum(axis=1))
        assert accepted == pytest.approx(closed, abs=TOLERANCE)
        assert plan.acceptance(p, q, 1) == pytest.approx(closed, abs=TOLERANCE)
        harmonic = np.sum(p[both] * q[both] / (p[both] + q[both]))
        assert harmonic - TOLERANCE <= closed <= np.minimum(p, q).sum() + TOLERANCE


def test_race_select_follows_the_acceptance_by_child_index():
    """R sums to 1 over all drafts, and `select` follows it (ERSD, eq. (3))."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    R = race.index_pmf(p, q, 6)
    assert R.sum() == pytest.approx(1, abs=TOLERANCE)
    np.testing.assert_allclose(
        np.cumsum(R), [transport.get("race").acceptance(p, q, k) for k in range(1, 7)], atol=1e-12
    )

    @jax.jit
    @jax.vmap
    def index(key):
        drafts = draws.arrivals(jax.random.fold_in(key, 0), jnp.float32(p), 6)
        pmfs = jnp.float32(p), jnp.float32(q)
        token = race.Race().choose(jax.random.fold_in(key, 0), *pmfs, drafts, jnp.ones(6, bool))
        return jnp.argmax(drafts == token)

    counts = np.bincount(index(jax.random.split(jax.random.key(0), 100_000)), minlength=6)
    assert chi_square.p_value(counts, R) > 1e-3


def test_race_clocks_resolve_rare_tokens():
    """Tokens below 1e-7 win by clocks near 2^-24, so clocks must not be multiples of 2^-23."""
    clocks = np.exp(
        np.asarray(draws.log_arrivals(jax.random.key(0), jnp.ones(1 << 23)), np.float64)
    )
    steps = clocks[clocks < 64 * 2.0**-24] * 2**24
    assert 10 < len(steps) < 70  # A fraction of 2^-18 of the 2^23 clocks is that small.
    assert np.mean(np.abs(steps - np.round(steps))) > 0.1


def test_race_acceptance_of_a_large_vocabulary_is_refused():
    with pytest.raises(UserError, match=r"V=2000: .*1,000"):
        transport.get("race").acceptance(np.full(2000, 1 / 2000), np.full(2000, 1 / 2000), 2)
