"""`otm_layer` against the distribution of its output given the drafts, computed here in float64 by quadrature."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectr_jax.decoding import Policy, get_method
from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree, parse
from spectr_jax.decoding.verifiers import lattice
from spectr_jax.models.table import perturbed, random_table
from spectr_jax.testing import chi_square
from spectr_jax.transport import otm

NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)
UNEVEN = Tree((0, 0, 1, 1, 2))
EARLY_LEAF = Tree((0, 0, 0, 2, 3))
"""A node of the first layer has no drafts, others of it have."""


def _win_probabilities(contests):
    """The probability [D] that each draft has the highest U^kappa; a contest is kappa, and a density of U: the edges of its
    cells [C + 1] and their masses [C] after the move."""
    most = max(kappa for kappa, _, _ in contests)
    # s = U^(kappa / most), of which all distributions are smooth between these points.
    points = np.unique(
        np.concatenate([[0.0, 1.0], *(edges ** (kappa / most) for kappa, edges, _ in contests)])
    )
    wins = np.zeros(len(contests))
    for low, high in itertools.pairwise(points):
        half = (NODES + 1) / 2
        power = 6 if low == 0 else 1  # At 0 they are powers of s, and smooth in its sixth root.
        s, weight = (
            low + (high - low) * half**power,
            (high - low) * WEIGHTS / 2 * power * half ** (power - 1),
        )
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
    """{output of a call: probability} given the tokens of all nodes; `p_of` and `q_of` take the tokens behind the root."""
    spelled = {
        node: tuple(tokens[above] for above in np.flatnonzero(tree.ancestors[node])[1:])
        for node in range(tree.size + 1)
    }
    layers, residual, score = [], {}, {(): 1.0}
    for depth in range(tree.height + 1):
        at = [
            path
            for path in dict.fromkeys(spelled[node] for node in tree.levels[depth])
            if score.get(path, 0) > 0
        ]
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
        (UNEVEN, 2, 1.0),
        (EARLY_LEAF, 2, 1.0),
        ("3", 3, 2.0),
    ],
)
def test_the_recipe_is_exact(tree, V, noise):
    """All drafted trees, weighted by their probability: outputs, continued by the target, have its distribution."""
    tree = parse(tree)
    for seed in range(3):
        p_of, q_of = _p_and_q(seed, V, noise)
        emitted = np.zeros([V] * (tree.height + 1))
        for drawn in itertools.product(range(V), repeat=tree.size):
            tokens = (0, *drawn)
            chance = 1.0
            for node in range(1, tree.size + 1):
                above = tuple(tokens[each] for each in np.flatnonzero(tree.ancestors[node])[1:-1])
                chance *= p_of(above)[tokens[node]]
            for output, probability in _outputs(tree, tokens, p_of, q_of).items():
                emitted[output] += chance * probability * _continued(q_of, output, tree.height + 1)
        np.testing.assert_allclose(emitted, _continued(q_of, (), tree.height + 1), atol=1e-9)


def _continued(q_of, path, length):
    """The target's probabilities of what follows `path`, up to `length` tokens in all."""
    if len(path) == length:
        return 1.0
    q = q_of(path)
    return np.stack(
        [q[token] * _continued(q_of, (*path, token), length) for token in range(len(q))]
    )


@functools.partial(jax.jit, static_argnums=0)
def _walks(method, keys, tokens, p, logits):
    """One program for all tokens on a tree."""

    def one(key):
        return method.verifier(key, _scored(method, tokens, p, logits))

    return jax.lax.map(one, keys, batch_size=500)


@functools.partial(jax.jit, static_argnums=0)
def _expected(method, keys, tokens, p, logits):
    """Expected number of emitted tokens, for each key."""
    return jax.vmap(
        lambda key: method.verifier.expected(key, _scored(method, tokens, p, logits))[0]
    )(keys)


def _scored(method, tokens, p, logits):
    return ScoredTree(
        tree=method.tree, policy=Policy(), length=jnp.int32(7), tokens=tokens, p=p, logits=logits
    )


@pytest.mark.parametrize(
    ("tree", "tokens"),
    [
        pytest.param("2,1", (1, 1, 2, 0), marks=pytest.mark.xdist_group("layer")),
        pytest.param("2,1", (1, 2, 0, 3), marks=pytest.mark.xdist_group("layer")),
        pytest.param("3,1", (1, 2, 1, 3, 0, 0), marks=pytest.mark.slow),
        pytest.param("2,2", (2, 2, 1, 3, 1, 0), marks=pytest.mark.slow),
        pytest.param("2,1,1", (3, 0, 1, 1, 2, 0), marks=pytest.mark.slow),
        pytest.param("1,2", (3, 1, 0), marks=pytest.mark.slow),
        (UNEVEN, (2, 1, 0, 3, 3)),
        (EARLY_LEAF, (1, 1, 2, 3, 0)),
        pytest.param("4", (1, 2, 2, 0), marks=pytest.mark.slow),
    ],
)
def test_outputs_given_the_drafts(tree, tokens):
    """A walk on the same drafted tree, 5,000 times, with so many competitions that their shares are the probabilities."""
    tree, V, texts = parse(tree), 4, 5_000
    method = get_method("otm_layer", tree=tree, competitions=128)
    p_of, q_of = _p_and_q(5, V, 1.0)
    tokens = (1, *tokens)
    spelled = [
        tuple(tokens[above] for above in np.flatnonzero(tree.ancestors[node])[1:])
        for node in range(tree.size + 1)
    ]
    p = jnp.float32([p_of(spelled[node]) for node in tree.inner])
    logits = jnp.log(jnp.float32([q_of(path) for path in spelled]))

    chosen = _walks(
        method, jax.random.split(jax.random.key(3), texts), jnp.int32(tokens), p, logits
    )
    pmf = _outputs(tree, tokens, p_of, q_of)
    assert sum(pmf.values()) == pytest.approx(1, abs=1e-9)
    numbers = {output: index for index, output in enumerate(pmf)}
    emitted, counts = np.asarray(chosen.emitted), np.zeros(len(pmf))
    for length in range(1, tree.height + 2):
        rows, number = np.unique(
            np.asarray(chosen.tokens)[emitted == length, :length], axis=0, return_counts=True
        )
        for row, count in zip(rows.tolist(), number, strict=True):
            counts[numbers[tuple(row)]] += count
    assert chi_square.p_value(counts, np.array(list(pmf.values()))) > 1e-4

    expected = _expected(
        method, jax.random.split(jax.random.key(4), 200), jnp.int32(tokens), p, logits
    )
    mean = sum(len(output) * probability for output, probability in pmf.items())
    assert np.mean(expected) == pytest.approx(mean, abs=0.01)


def test_places_in_a_layer():
    """Uniforms of a competition are independent of each other; those of all competitions are spread evenly."""
    uniforms = jax.vmap(lambda key: lattice.uniforms(key, (4, 3), 64))(
        jax.random.split(jax.random.key(0), 4_000)
    )
    values = np.asarray(uniforms)
    assert values.shape == (4_000, 4, 3, 64) and values.min() >= 0 and values.max() < 1
    one = values[..., 37].reshape(4_000, -1)
    assert np.abs(np.corrcoef(one.T) - np.eye(12)).max() < 0.06
    assert np.abs(one.mean(axis=0) - 0.5).max() < 0.025
    independent = np.random.default_rng(0).random(values.shape)
    assert values.mean(axis=-1).std() < 0.3 * independent.mean(axis=-1).std()


def test_primes():
    assert lattice._primes(10).tolist() == [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]
    assert all(len(lattice._primes(count)) == count for count in (1, 3, 192, 3_000))
