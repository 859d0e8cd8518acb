r"""Phase 3 of a call (select): all drafts of a layer compete, and any path of the tree can be the accepted one.

`otm_block` follows one path, that of the winners, and the rest of the tree is lost. Here each node v of a layer, with all
that spell the same tokens taken as one, has a score w_v in [0, 1], the probability that the output passes through it. The
root has 1. From the root down, with q and p the distributions at v, k_v its drafts and b_v = w_v / sum of w its budget:

1. v runs the optimal plan (`transport.otm`) for kappa_v = k_v / b_v drafts, a real number, with the winner's distribution
   g_v. Each draft takes its cell as there, a uniform place U in it (within the cumulative sum of p), and competes with
   U^kappa_v. The highest of the whole layer wins: it is v's token t with probability b_v g_v(t).
2. Let pi(v, t) be the probability of that given the drafts. The node of t below v gets the score

$$w_{vt} = \pi(v, t) \min\left(1, \frac{w_v q_v(t)}{b_v g_v(t)}\right), \qquad R_v(x) = (w_v q_v(x) - b_v g_v(x))_+$$

   and R_v is what is left to v (at a leaf all of w_v q_v). In the mean over drafts w_vt is w_v q_v(t) - R_v(t).

Then, from the deepest layer up, with S the sum of w and r that of all R of a layer: stop there with probability
r / (r + 1 - S), at a node drawn by the sum of its R, and emit the path to it and a token drawn from R. The sweep is that of
layer verification (Cha et al., 2026); the competition is ours. The proof is in docs/otm_layer.md.

pi is the mean of `competitions` drawn competitions: exact for any number of them, since the mean of a share is right and the
shares sum to 1. With one chain this is block verification (Sun et al., 2024), on one level it accepts as `otm` does.

Shape suffixes: N drafted nodes, W nodes of a layer, D drafts of a layer (the nodes of the next), M competitions, C cells.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding.policy import Policy, probabilities
from spectr_jax.decoding.selection import Selection, draft_law, drawable, ending_at, in_turn, last_token
from spectr_jax.decoding.tree import Tree
from spectr_jax.transport import otm
from spectr_jax.transport.base import Plan, draw, or_else

COMPETITIONS = 64
"""Drawn for a layer by default."""
MOST = 64
"""Ratios q / p above this share a cell of a large vocabulary."""


class _Drafted(NamedTuple):
    """What a call has drafted for one sequence, and scored."""

    tree: Tree
    policy: Policy
    tokens: jax.Array
    p: jax.Array
    logits: jax.Array

    def laws(self, node, child) -> tuple[jax.Array, jax.Array]:
        """p and q [V] at a node; `child` is a draft of it, or 0 for none, where p is undefined."""
        q = probabilities(self.logits[node], self.policy)
        p = draft_law(self.tree, self.p, child, q)
        return jnp.where(p > 0, p, 0), q


class _Scores(NamedTuple):
    """Of nodes [N + 1]. Where several spell the same tokens, the first of them stands for all; the others have 0.

    Attributes:
      depth: [] of the layer whose drafts compete next.
      first: the first node that spells the same tokens.
      score: w.
      child: a draft of it, or 0 for none.
      drafts: k, the number of them.
      budget: b.
      residual: the sum of R.
    """

    depth: jax.Array
    first: jax.Array
    score: jax.Array
    child: jax.Array
    drafts: jax.Array
    budget: jax.Array
    residual: jax.Array


class _Contest(NamedTuple):
    """How the D drafts of a layer compete, those of other nodes unused.

    Attributes:
      matching: of the cells that exchange drafts.
      below: [C] mass of p before each cell.
      above: [C] and behind it.
      mass: [C] of each cell.
      cell: [D] of each draft, before it moves.
      rho: [D] g / p of each draft.
    """

    matching: otm.Matching
    below: jax.Array
    above: jax.Array
    mass: jax.Array
    cell: jax.Array
    rho: jax.Array


class _Plan(NamedTuple):
    """The optimal plan at a node, for the D drafts of the layer.

    Attributes:
      contest: of those of this node.
      ratio: [D] w q / (b g) of each draft.
      residual: [] the sum of R.
    """

    contest: _Contest
    ratio: jax.Array
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Walk:
    """The walk of a method, `Method.walk`, with its number of competitions: equal ones hash alike.

    Attributes:
      competitions: drawn for each layer; more of them make the scores less noisy, and the sequences no more exact.
    """

    competitions: int = COMPETITIONS

    def __call__(
        self,
        key: jax.Array,
        plan: Plan,
        tree: Tree,
        policy: Policy,
        length: jax.Array,
        tokens: jax.Array,
        p: jax.Array,
        logits: jax.Array,
    ) -> Selection:
        """As `selection.select`, for the plan `otm` and i.i.d. drafts. Consumes `key`."""
        del plan
        drafted = _Drafted(tree, policy, tokens, p, logits)
        scores = _scored(key, drafted, length, self.competitions)
        return _sweep(jax.random.fold_in(key, length + tree.height + 1), drafted, scores)

    def expected(
        self,
        key: jax.Array,
        tree: Tree,
        policy: Policy,
        length: jax.Array,
        tokens: jax.Array,
        p: jax.Array,
        logits: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Expected number of emitted tokens given the drafts and the competitions of `key`, which it consumes; and one more
        than the sum of all scores, which has the same mean over drafted trees."""
        scores = _scored(key, _Drafted(tree, policy, tokens, p, logits), length, self.competitions)
        residual_L, score_L = _of_layers(tree, scores)
        open_L = residual_L + jnp.maximum(1 - score_L, 0)
        goes_on_L = 1 - jnp.where(residual_L > 0, residual_L / jnp.where(residual_L > 0, open_L, 1), 0)
        reaches_L = 1 - jnp.cumprod(goes_on_L[::-1])[::-1]  # The sweep stops there or deeper.
        return 1 + jnp.sum(reaches_L[1:]), jnp.sum(score_L)


def _scored(key, drafted: _Drafted, length, competitions: int) -> _Scores:
    """The scores of all nodes, from the root down. Consumes `key`."""
    tree, p = drafted.tree, drafted.p

    def step(scores: _Scores) -> _Scores:
        return _compete(jax.random.fold_in(key, length + scores.depth), drafted, scores, competitions)

    def alive(scores: _Scores) -> jax.Array:
        return jnp.any((scores.score > 0) & (jnp.asarray(tree.depth) == scores.depth))

    none, no_node = jnp.zeros(tree.size + 1, p.dtype), jnp.zeros(tree.size + 1, jnp.int32)
    start = _Scores(jnp.int32(0), no_node, none.at[0].set(1), no_node, no_node, none, none)
    return jax.lax.while_loop(alive, step, start)


def _compete(key, drafted: _Drafted, scores: _Scores, competitions: int) -> _Scores:
    """The drafts below one layer compete: all about its nodes but the score, and the scores of the next layer. Consumes
    `key`."""
    tree, N = drafted.tree, drafted.tree.size
    levels, parent = jnp.asarray(tree.level_table, jnp.int32), jnp.asarray(tree.parent, jnp.int32)
    nodes_W, drafts_D = levels[scores.depth], levels[scores.depth + 1]
    parents_D = scores.first[parent[drafts_D]]
    stands_W = (nodes_W >= 0) & (scores.first[nodes_W] == nodes_W)
    score_W = jnp.where(stands_W, scores.score[nodes_W], 0)
    usable_D = (drafts_D >= 0) & drawable(tree, drafted.tokens, drafted.p)[drafts_D]
    belongs_WxD = (parents_D == nodes_W[:, None]) & usable_D & (score_W > 0)[:, None]
    k_W = jnp.sum(belongs_WxD, axis=1, dtype=jnp.int32)
    child_W = jnp.where(k_W > 0, drafts_D[jnp.argmax(belongs_WxD, axis=1)], 0)
    competing_W = jnp.where(k_W > 0, score_W, 0)
    budget_W = competing_W / jnp.maximum(jnp.sum(competing_W), jnp.finfo(score_W.dtype).tiny)
    tokens_D = drafted.tokens[drafts_D]
    plans_W = _plans(drafted, tokens_D, nodes_W, child_W, k_W, score_W, budget_W)

    competes_D, node_D = jnp.any(belongs_WxD, axis=0), jnp.argmax(belongs_WxD, axis=0)
    share_D = _shares(key, plans_W.contest, _kappa(k_W, budget_W), node_D, competes_D, competitions)
    same_DxD = (parents_D[:, None] == parents_D) & (tokens_D[:, None] == tokens_D) & competes_D
    first_D = jnp.argmax(same_DxD, axis=1)
    ratio_D = jnp.take_along_axis(plans_W.ratio, node_D[None], axis=0)[0]
    below_D = jnp.sum(jnp.where(same_DxD, share_D, 0), axis=1) * jnp.minimum(ratio_D, 1)
    below_D = jnp.where(competes_D & (first_D == jnp.arange(len(drafts_D))), below_D, 0)
    at_D, at_W = jnp.where(competes_D, drafts_D, N + 1), jnp.where(score_W > 0, nodes_W, N + 1)
    return _Scores(
        scores.depth + 1,
        scores.first.at[at_D].set(drafts_D[first_D], mode="drop"),
        scores.score.at[at_D].set(below_D, mode="drop"),
        scores.child.at[at_W].set(child_W, mode="drop"),
        scores.drafts.at[at_W].set(k_W, mode="drop"),
        scores.budget.at[at_W].set(budget_W, mode="drop"),
        scores.residual.at[at_W].set(plans_W.residual, mode="drop"),
    )


def _plans(drafted: _Drafted, tokens_D, *of_nodes_W) -> _Plan:
    """The plans at the nodes of a layer; those of score 0 are unused, and cost a CPU nothing where the vocabulary is
    large."""

    def at_node(node, child, k, score, budget):
        return _plan(*drafted.laws(node, child), tokens_D, k, score, budget)

    if not in_turn(drafted.logits.shape[-1]):
        return jax.vmap(at_node)(*of_nodes_W)
    nothing = jax.eval_shape(at_node, *(values[0] for values in of_nodes_W))

    def unless_0(of_node):
        return jax.lax.cond(
            of_node[3] > 0,
            lambda: at_node(*of_node),
            lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), nothing),
        )

    return jax.lax.map(unless_0, of_nodes_W)


def _plan(p, q, tokens_D, k, score, budget) -> _Plan:
    def several():
        cells, winner, shared = _winner(p, q, k, budget)
        rho = otm.token_ratios(p, q, cells.of_token, shared)
        below = otm.cumulative(jnp, cells.p) - cells.p
        above = otm.cumulative(jnp, cells.p[::-1])[::-1] - cells.p
        cell_D = cells.of_token[tokens_D]
        return _Contest(otm.matched(cells, winner), below, above, cells.p, cell_D, rho[tokens_D]), p * rho

    def alone():
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(several)[0])
        return nothing, p

    contest, g = jax.lax.cond(_is_alone(k, budget), alone, several)
    won_D = budget * g[tokens_D]
    ratio_D = jnp.where(q[tokens_D] > 0, score * q[tokens_D] / jnp.maximum(won_D, jnp.finfo(won_D.dtype).tiny), 0)
    return _Plan(contest, ratio_D, jnp.sum(jnp.maximum(score * q - budget * g, 0)))


def _winner_law(p, q, k, budget) -> jax.Array:
    """g [V]."""

    def several():
        cells, _, shared = _winner(p, q, k, budget)
        return cells.of_token, shared

    def alone():
        of_token, shared = jax.eval_shape(several)
        return jnp.zeros(of_token.shape, of_token.dtype), jnp.ones(shared.shape, shared.dtype)

    # Looked up outside, or XLA on a CPU computes what a cell shares anew for each of its tokens.
    return p * otm.token_ratios(p, q, *jax.lax.cond(_is_alone(k, budget), alone, several))


def _winner(p, q, k, budget) -> tuple[otm.Cells, otm.WinnerLaw, jax.Array]:
    """Cells, the winner's distribution by cell, and the ratios that tokens share [C], for kappa drafts."""
    cells = otm.cells_of(p, q, MOST)
    winner = otm.winner_law(cells.p, cells.q, _kappa(k, budget))
    return cells, winner, otm.shared_ratios(cells, winner)


def _is_alone(k, budget) -> jax.Array:
    """Whether the layer has one draft and no other: it wins, and g is p."""
    return (k == 1) & (budget == 1)


def _kappa(k, budget) -> jax.Array:
    """k / b, and finite: a node of such a small budget as 1e-30 is never seen."""
    return jnp.maximum(k / jnp.clip(budget, 1e-30, 1), 1)


def _shares(key, contests_W: _Contest, kappa_W, node_D, competes_D, competitions: int) -> jax.Array:
    """How many of the competitions each draft of the layer wins [D], as a share; consumes `key`."""
    alone_D = competes_D.astype(kappa_W.dtype)
    D = len(competes_D)
    if D == 1:
        return alone_D

    uniforms_Dx3xM = _uniforms(key, D, competitions)

    def drawn():
        places = jax.vmap(functools.partial(_places, contests_W, kappa_W))
        places_DxM = places(uniforms_Dx3xM, node_D, jnp.arange(D))
        winner_M = jnp.argmax(jnp.where(competes_D[:, None], places_DxM, -jnp.inf), axis=0)
        return jnp.zeros_like(alone_D).at[winner_M].add(1 / competitions)

    return jax.lax.cond(jnp.sum(competes_D) > 1, drawn, lambda: alone_D)


def _places(contests_W: _Contest, kappa_W, uniforms_3xM, node, draft) -> jax.Array:
    """kappa log U of one draft, in each competition [M]; near 1 it is precise, as large kappa want it."""
    contest = jax.tree.map(lambda leaf: leaf[node], contests_W)
    level, move, place = uniforms_3xM
    cell = otm.moved(contest.matching, contest.cell[draft], contest.rho[draft], level, move)
    below = contest.below[cell] + place * contest.mass[cell]
    above = contest.above[cell] + (1 - place) * contest.mass[cell]
    tiny = jnp.finfo(below.dtype).tiny
    return kappa_W[node] * jnp.where(above < 0.5, jnp.log1p(-jnp.minimum(above, 0.75)), jnp.log(jnp.maximum(below, tiny)))


def _uniforms(key, D: int, M: int) -> jax.Array:
    """Uniforms [D, 3, M], independent for each competition, and evenly spread over the competitions: a lattice that is
    shifted at random (Cranley and Patterson, 1976). Consumes `key`."""
    steps = np.sqrt(_primes(3 * D)).reshape(D, 3, 1) * np.arange(M) % 1
    return (jax.random.uniform(key, (D, 3, 1)) + steps.astype(np.float32)) % 1


def _primes(count: int) -> np.ndarray:
    """The first ones."""
    limit = 20 + int(1.5 * count * np.log(count + 2))
    sieve = np.ones(limit, bool)
    sieve[:2] = False
    for factor in range(2, int(limit**0.5) + 1):
        sieve[factor * factor :: factor] = False
    return np.flatnonzero(sieve)[:count]


def _of_layers(tree: Tree, scores: _Scores) -> jax.Array:
    """r and S, [2, height + 1]."""
    sums = jnp.zeros((2, tree.height + 1), scores.score.dtype)
    return sums.at[:, jnp.asarray(tree.depth)].add(jnp.stack([scores.residual, scores.score]))


def _sweep(key, drafted: _Drafted, scores: _Scores) -> Selection:
    """Stops at a node, from the deepest layer up, and emits the path to it and a token more; consumes `key`."""
    tree = drafted.tree
    layer_key, node_key, token_key = jax.random.split(key, 3)
    depth = jnp.asarray(tree.depth)
    residual_L, score_L = _of_layers(tree, scores)
    uniform_L = jax.random.uniform(layer_key, (tree.height + 1,))
    stops_L = (uniform_L * (residual_L + jnp.maximum(1 - score_L, 0)) < residual_L).at[0].set(True)
    last = (tree.height - jnp.argmax(stops_L[::-1])).astype(jnp.int32)
    is_root = jnp.arange(tree.size + 1) == 0
    weights = jnp.where(depth == last, scores.residual, 0)
    node = draw(node_key, or_else(weights, is_root.astype(weights.dtype)))  # By rounding alone none is left.

    p, q = drafted.laws(node, scores.child[node])
    g = _winner_law(p, q, scores.drafts[node], scores.budget[node])
    left = jnp.maximum(scores.score[node] * q - scores.budget[node] * g, 0)
    return ending_at(tree, drafted.tokens, node, last_token(token_key, or_else(left, q)), scores.drafts[scores.first])
