"""Plans remain exact on distributions for which float32 loses precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax import transport
from spectr_jax.testing import chi_square
from spectr_jax.transport import kseq, otm
from spectr_jax.transport.draws import draw

optimized = pytest.mark.optimized  # For tests with many draws.
DRAWS = 100_000


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _emitted(choose, p, q, k, draws=DRAWS):
    """Returns how often each token is emitted, with new drafts in each draw."""

    def one(key):
        draft_key, key = jax.random.split(key)
        return choose(key, p, q, draw(draft_key, p, (k,)), jnp.ones(k, bool))

    return jnp.bincount(
        jax.lax.map(one, jax.random.split(jax.random.key(0), draws), batch_size=1_000),
        length=len(q),
    )


def _spread(rng, main, rest, concentration):
    return np.append(1 - main, main * rng.dirichlet(np.full(rest, concentration)))


def test_otm_finds_the_right_partners_without_a_loop():
    """The partners equal those that NumPy finds, also for uniforms of 0 and 1.

    A GPU would launch the kernels of each step of a loop separately.
    """
    p, q = (jnp.float32(_spread(np.random.default_rng(seed), 0.9, 299, 0.3)) for seed in (0, 1))
    cells = otm.cells_of(p, q, 8)
    winner = otm.winner_pmf(cells.p, cells.q, 8)
    matching, own = otm.matched(cells, winner), cells.of_token
    levels = jnp.asarray([0.0, 0.1, 0.5, 0.9, 1.0])[:, None]
    rho = otm.token_ratios(p, q, own, otm.shared_ratios(cells, winner))
    search = jax.jit(functools.partial(otm.moved, move=0.0)).lower(matching, own, rho, levels)
    assert "stablehlo.while" not in search.as_text()

    (given, taken), surplus = matching.sums, matching.surplus[own]
    mass = jnp.where(surplus >= 0, given[own], taken[own]) - levels * jnp.abs(surplus)
    partner = np.where(surplus >= 0, np.searchsorted(taken, mass), np.searchsorted(given, mass))
    moved = search.compile()(matching, own, rho, levels)
    stays = np.asarray(moved == own)
    np.testing.assert_array_equal(np.where(stays, own, partner), moved)
    assert np.mean(stays) < 0.5


@optimized
@pytest.mark.parametrize("seed", [0, 7])
def test_otm_moves_no_draft_without_a_partner(seed):
    """With 61 drafts most masses of phi are 0, and rounding leaves a surplus without a deficit."""
    p, q = (_spread(np.random.default_rng(seed), main, 299, 30.0) for main in (1e-2, 1e-7))
    choose = transport.get("otm").choose
    assert _emitted(choose, jnp.float32(p), jnp.float32(q), 61, 5_000)[0] == 5_000


@optimized
@pytest.mark.xdist_group("simplex")  # One program.
@pytest.mark.parametrize("seed", [941, 1872, 665])
def test_spectr_plus_plus_follows_q_despite_simplex_errors(seed):
    """If p and q differ greatly, the float32 simplex method has errors of up to 0.03."""
    p, q = np.exp(4 * np.random.default_rng(seed).normal(size=(2, 20)))
    p, q = p / p.sum(), q / q.sum()
    counts = _emitted(transport.get("spectr++").choose, jnp.float32(p), jnp.float32(q), 8, 40_000)
    assert chi_square.p_value(np.asarray(counts), q) > 1e-4


@optimized
@pytest.mark.parametrize("gamma", [1.0, 1.3])
def test_k_sequential_selection_is_exact_below_gamma_star(gamma):
    p, q = np.random.default_rng(0).dirichlet(np.ones(6), 2)
    assert gamma < kseq.optimal_gamma_exact(p, q, 4) - 0.2
    choose = functools.partial(kseq.sequential, gamma=gamma)
    counts = _emitted(choose, jnp.float32(p), jnp.float32(q), 4)
    assert chi_square.p_value(np.asarray(counts), q) > 1e-4


@pytest.mark.parametrize("V", [1_500, 50_257])
def test_cells_of_many_equal_tokens_keep_their_mass(V):
    p, q = jnp.full(V, 1 / V), jnp.where(jnp.arange(V) % 2, 1.5 / V, 0.5 / V)
    cells = jax.jit(otm.cells_of, static_argnums=2)(p, q, 8)
    for mass, pmf in ((cells.p, p), (cells.q, q)):
        assert abs(np.asarray(mass, float).sum() - np.asarray(pmf, float).sum()) < 1e-6


@pytest.mark.parametrize("name", sorted(transport.PLANS.keys() - {"optimal_kseq"}))
def test_select_runs_with_x64(name):
    V = 300
    p, q = np.random.default_rng(0).dirichlet(np.ones(V), 2)
    with jax.enable_x64(True):
        token, _ = jax.jit(transport.get(name).select)(
            jax.random.key(0), p, q, jnp.arange(3), jnp.ones(3, bool)
        )
    assert 0 <= token < V


@pytest.mark.parametrize("name", ["maximal", "recursive", "otm"])
def test_select_emits_minus_one_if_q_is_zero(name):
    p, nothing, drafts = jnp.full(5, 0.2), jnp.zeros(5), jnp.arange(5)
    choice = jax.jit(transport.get(name).select)(
        jax.random.key(0), p, nothing, drafts, jnp.ones(5, bool)
    )
    assert choice.token == -1 and not choice.accepted
