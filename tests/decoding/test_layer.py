"""The outputs of `otm_layer` follow their exact distribution given the drafts.

The reference computes the competition by quadrature, in float64.
"""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.policy import shaping_of
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree, parse
from spectr_jax.decoding.verifiers import lattice
from spectr_jax.models.table import perturbed, random_table
from spectr_jax.testing import chi_square
from spectr_jax.transport import otm

NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)
UNEVEN = Tree((0, 0, 1, 1, 2))
EARLY_LEAF = Tree((0, 0, 0, 2, 3))
"""A tree whose first layer has a leaf and nodes with children."""


def _win_probabilities(contests):
    """Returns the probability [D] that each draft has the highest U^kappa.

    A contest is (kappa, edges of its cells [C + 1], masses of the cells [C] after the move).
    """
    most = max(kappa for kappa, _, _ in contests)
    # Between these points, all distributions are smooth in s = U^(kappa / most).
    edges_of_s = [edges ** (kappa / most) for kappa, edges, _ in contests]
    points = np.unique(np.concatenate([[0.0, 1.0], *edges_of_s]))
    wins = np.zeros(len(contests))
    for low, high in itertools.pairwise(points):
        half = (NODES + 1) / 2
        # Near 0 the distributions are powers of s, which are smooth in its sixth root.
        power = 6 if low == 0 else 1
        s = low + (high - low) * half**power
        weight = (high - low) * WEIGHTS / 2 * power * half ** (power - 1)
        below, density = [], []
        for kappa, edges, masses in contests:
            place = s ** (most / kappa)
            below.append(np.interp(place, edges, np.concatenate([[0], np.cumsum(masses)])))
            cell = np.clip(np.searchsorted(edges, place, side="right") - 1, 0, len(masses) - 1)
            width = edges[cell + 1] - edges[cell]
            slope = np.divide(masses[cell], width, out=np.zeros_like(width), where=width > 0)
            density.append(slope * most / kappa * s ** (most / kappa - 1))
        for own in range(len(contests)):
            others = np.prod(np.delete(below, own, axis=0), axis=0)
            wins[own] += np.sum(weight * density[own] * others)
    return wins


def _outputs(tree, tokens, p_of, q_of):
    """Returns the probability of each output of a call, given the tokens of the tree.

    `p_of` and `q_of` are functions of a path of tokens.
    """
    spelled = _spelled(tree, tokens)
    layers, residual, score = [], {}, {(): 1.0}
    for depth in range(tree.height + 1):
        paths = dict.fromkeys(spelled[node] for node in tree.levels[depth])
        at = [path for path in paths if score.get(path, 0) > 0]
        layers.append(at)
        drafts = {path: [] for path in at}
        for child in tree.levels[depth + 1] if depth < tree.height else []:
            if spelled[tree.parent[child]] in drafts:
                drafts[spelled[tree.parent[child]]].append(tokens[child])
        competing = sum(score[path] for path in at if drafts[path])
        contests, places = [], []
        for path in at:
            p, q, w, k = p_of(path), q_of(path), score[path], len(drafts[path])
            if not k:
                residual[path] = w * q
                continue
            budget = w / competing
            cells, winner, moves = otm._exact(p, q, k / budget)
            g = p * winner.rho[cells.of_token]
            residual[path] = np.maximum(w * q - budget * g, 0)
            edges = np.append(0, np.cumsum(cells.p) / cells.p.sum())
            for token in drafts[path]:
                contests.append((k / budget, edges, moves[cells.of_token[token]]))
                kept = min(1.0, w * q[token] / (budget * g[token])) if g[token] > 0 else 0.0
                places.append(((*path, token), kept))
        wins = _win_probabilities(contests) if contests else []
        for share, (path, kept) in zip(wins, places, strict=True):
            score[path] = score.get(path, 0) + share * kept
    pmf, left = {}, 1.0
    for depth in range(tree.height, -1, -1):
        r = sum(residual[path].sum() for path in layers[depth])
        S = sum(score[path] for path in layers[depth])
        stop = 1.0 if depth == 0 else r / (r + max(1 - S, 0)) if r else 0.0
        for path in layers[depth]:
            for token, mass in enumerate(residual[path] if r else []):
                pmf[*path, token] = left * stop * mass / r
        left *= 1 - stop
    return pmf


def _spelled(tree, tokens):
    """Returns the tokens on the path to each node, without the root's."""
    return [
        tuple(tokens[above] for above in np.flatnonzero(tree.ancestors[node])[1:])
        for node in range(tree.size + 1)
    ]


def _p_and_q(seed, V, noise):
    target = random_table(seed, V, 0.7)
    draft = perturbed(target, seed + 1, noise)

    def of(table):
        return lambda path: table[(0, 1, *path)[-2], (0, 1, *path)[-1]]

    return of(draft), of(target)


@pytest.mark.parametrize(
    ("tree", "V", "noise"),
    [
        ("2,1", 3, 1.0),
        ("3,1", 2, 2.0),
        ("2,2", 2, 1.0),
        ("2,1,1", 2, 1.5),
        ("1,2", 3, 1.0),
        pytest.param(UNEVEN, 2, 1.0, id="uneven tree"),
        pytest.param(EARLY_LEAF, 2, 1.0, id="early leaf"),
        ("3", 3, 2.0),
    ],
)
def test_averaged_over_drafts_the_reference_follows_the_target(tree, V, noise):
    """Each output of `_outputs` is continued by the target to the same length."""
    tree = parse(tree)
    for seed in range(3):
        p_of, q_of = _p_and_q(seed, V, noise)
        emitted = np.zeros([V] * (tree.height + 1))
        for drawn in itertools.product(range(V), repeat=tree.size):
            tokens = (0, *drawn)
            chance = np.prod([p_of(above)[token] for *above, token in _spelled(tree, tokens)[1:]])
            for output, probability in _outputs(tree, tokens, p_of, q_of).items():
                emitted[output] += chance * probability * _continued(q_of, output, tree.height + 1)
        np.testing.assert_allclose(emitted, _continued(q_of, (), tree.height + 1), atol=1e-9)


def _continued(q_of, path, length):
    """Returns the target's probabilities of all continuations of `path` to `length` tokens."""
    if len(path) == length:
        return 1.0
    return np.stack(
        [q * _continued(q_of, (*path, token), length) for token, q in enumerate(q_of(path))]
    )


@functools.partial(jax.jit, static_argnums=0)
def _selections(method, keys, tokens, p, logits):
    scored = ScoredTree(
        tree=method.tree,
        shaping=shaping_of(Policy()),
        length=jnp.int32(7),
        tokens=tokens,
        p=p,
        logits=logits,
    )
    return jax.lax.map(lambda key: method.verifier(key, scored), keys, batch_size=500)


@pytest.mark.parametrize(
    ("tree", "tokens"),
    [
        pytest.param("2,1", (1, 1, 2, 0), marks=pytest.mark.xdist_group("layer")),
        pytest.param("2,1", (1, 2, 0, 3), marks=pytest.mark.xdist_group("layer")),
        pytest.param("3,1", (1, 2, 1, 3, 0, 0), marks=pytest.mark.slow),
        pytest.param("2,1,1", (3, 0, 1, 1, 2, 0), marks=pytest.mark.slow),
        pytest.param(UNEVEN, (2, 1, 0, 3, 3), id="uneven tree"),
        pytest.param(EARLY_LEAF, (1, 1, 2, 3, 0), id="early leaf"),
        pytest.param("4", (1, 2, 2, 0), marks=pytest.mark.slow),
    ],
)
def test_outputs_follow_their_exact_distribution_given_the_drafts(tree, tokens):
    """Calls the verifier 5,000 times on one tree. With 128 competitions, shares are close to pi."""
    tree, V = parse(tree), 4
    method = get_method("otm_layer", tree=tree, competitions=128)
    p_of, q_of = _p_and_q(5, V, 1.0)
    tokens = (1, *tokens)
    spelled = _spelled(tree, tokens)
    p = jnp.float32([p_of(spelled[node]) for node in tree.inner])
    logits = jnp.log(jnp.float32([q_of(path) for path in spelled]))

    keys = jax.random.split(jax.random.key(3), 5_000)
    chosen = _selections(method, keys, jnp.int32(tokens), p, logits)
    pmf = _outputs(tree, tokens, p_of, q_of)
    assert sum(pmf.values()) == pytest.approx(1, abs=1e-9)
    rows = zip(np.asarray(chosen.tokens).tolist(), np.asarray(chosen.emitted), strict=True)
    counts = collections.Counter(tuple(row[:emitted]) for row, emitted in rows)
    assert counts.keys() <= pmf.keys()
    observed = np.array([counts[output] for output in pmf])
    assert chi_square.p_value(observed, np.array(list(pmf.values()))) > 1e-4


def test_lattice_uniforms_are_independent_and_evenly_spread():
    keys = jax.random.split(jax.random.key(0), 4_000)
    values = np.asarray(jax.vmap(lambda key: lattice.uniforms(key, (4, 3), 64))(keys))
    assert values.shape == (4_000, 4, 3, 64) and values.min() >= 0 and values.max() < 1
    one = values[..., 37].reshape(4_000, -1)
    assert np.abs(np.corrcoef(one.T) - np.eye(12)).max() < 0.06
    assert np.abs(one.mean(axis=0) - 0.5).max() < 0.025
    independent = np.random.default_rng(0).random(values.shape)
    assert values.mean(axis=-1).std() < 0.3 * independent.mean(axis=-1).std()


def test_lattice_primes_are_the_first_primes():
    assert lattice._primes(10).tolist() == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    assert all(len(lattice._primes(count)) == count for count in (1, 3, 192, 3_000))
