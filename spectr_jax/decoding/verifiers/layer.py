r"""Phase 3 of a call (select): layer verification in which all drafts of a layer compete.

`otm_block` follows the path of the winners and discards the rest of the tree. Here any path can be
accepted. Nodes that spell the same tokens count as one node. Each node v has a score $w_v$ in
[0, 1], the probability that the output passes through it; the root has score 1. Let p and q be the
distributions at v, $k_v$ its number of drafts, and $b_v$ its budget: $w_v$ divided by the sum of w
over the nodes of the layer that have drafts. From the root down:

1. v runs the optimal plan (`transport.otm`) for a real number $\kappa_v = k_v / b_v$ of drafts,
   with winner's distribution $g_v$. Each draft takes a cell as in that plan, draws a uniform place
   U in it (within the cumulative sum of p), and competes with $U^{\kappa_v}$. The highest value of
   the layer wins. A draft of v with token t wins with probability $b_v g_v(t)$.
2. Let $\pi(v, t)$ be the probability of this win given the drafts. The child of v with token t gets
   the score $w_{vt}$, and v keeps the residual $R_v$ (at a leaf, $w_v q_v$):

$$w_{vt} = \pi(v, t) \min\left(1, \frac{w_v q_v(t)}{b_v g_v(t)}\right), \qquad
R_v(x) = (w_v q_v(x) - b_v g_v(x))_+.$$

   Averaged over drafts, $w_{vt} = w_v q_v(t) - R_v(t)$.

Then, from the deepest layer up, let S be the sum of w in a layer and r that of all its R. The sweep
stops at the layer with probability r / (r + 1 - S). There it draws a node by the sum of its R, and
emits the path to it and a token drawn from R. The sweep is that of layer verification (Cha et al.,
2026); the competition is ours. docs/otm_layer.md has the proof.

The code draws `competitions` competitions and takes their mean for $\pi$. This is exact for any
number of them, because the shares are unbiased and sum to 1. One chain gives block verification
(Sun et al., 2024); on one level the acceptance is that of `otm`.

Shape suffixes: N drafted nodes, W nodes of a layer, D drafts of a layer (the nodes of the next),
L layers, M competitions, C cells.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from spectr_jax.decoding.scored import ScoredTree
from spectr_jax.decoding.tree import Tree, check_positive
from spectr_jax.decoding.verifiers import base, lattice
from spectr_jax.decoding.verifiers.base import Selection, Verifier
from spectr_jax.decoding.zeros import zeros_like_output
from spectr_jax.transport import otm, rules
from spectr_jax.transport.base import or_else
from spectr_jax.transport.draws import draw, uniform
from spectr_jax.transport.types import BoolScalar, FloatScalar, IntScalar, Probs
from spectr_jax.utils import sharding

COMPETITIONS = 64
"""The default number of competitions per layer."""
LARGEST_RATIO = 64
"""With a large vocabulary, all ratios q / p above this share one cell."""

PerDraft: TypeAlias = Int[Array, " drafts"]
PerNode: TypeAlias = Float[Array, " nodes"]


@dataclasses.dataclass(frozen=True)
class Layer(Verifier):
    """Verifies all paths of a tree of i.i.d. drafts; the drafts of a layer compete.

    Attributes:
      competitions: the number drawn per layer. More make the scores less noisy, which raises the
        acceptance; the output is exact for any number.
    """

    rule = rules.IID
    competitions: int = COMPETITIONS

    def __post_init__(self) -> None:
        check_positive(competitions=self.competitions)

    def __call__(self, key: PRNGKeyArray, scored: ScoredTree) -> Selection:
        classes = _classes(scored)
        scores = _scores(key, scored, classes, self.competitions)
        sweep_key = jax.random.fold_in(key, scored.length + scored.tree.height + 1)
        return _sweep(sweep_key, scored, classes, scores)


class _Classes(NamedTuple):
    """The classes of nodes that spell the same tokens, by node; one node represents all."""

    first: Int[Array, " nodes"]  # The first node of the class, with children if any has.
    child: Int[Array, " nodes"]  # A draft below the class, or 0 if there is none.
    drafts: Int[Array, " nodes"]  # k, the number of drafts below the class.
    drawable: Bool[Array, " nodes"]  # Whether the draft model can draw the node.


class _Scores(NamedTuple):
    """The results of the competitions, by node; 0 for nodes that another represents."""

    score: PerNode  # w
    budget: PerNode  # b
    residual: PerNode  # The sum of R.


class _Contest(NamedTuple):
    """How the D drafts of a layer would compete at one node; a batch of nodes has a leading W."""

    kappa: Float[Array, "*width"]
    matching: otm.Matching  # The cells that exchange drafts.
    below: Float[Array, "*width cells"]  # The mass of p before each cell.
    above: Float[Array, "*width cells"]  # The mass of p after each cell.
    mass: Float[Array, "*width cells"]  # The mass of p in each cell.
    cell: Int[Array, "*width drafts"]  # The cell of each draft, before it moves.
    rho: Float[Array, "*width drafts"]  # g / p of each draft.


class _Node(NamedTuple):
    """The optimal plan at one node, for the D drafts of a layer; a batch has a leading W."""

    contest: _Contest
    ratio: Float[Array, "*width drafts"]  # w q / (b g) of each draft.
    residual: Float[Array, "*width"]  # The sum of R.


def _classes(scored: ScoredTree) -> _Classes:
    drawable, below = scored.draft_probability() > 0, base.candidates(scored, rules.IID)
    preference = 1 + jnp.asarray(scored.tree.is_inner)
    alike = jnp.where(scored.spelled_alike() & drawable, preference, 0)
    first = jnp.argmax(alike, axis=1).astype(jnp.int32)
    drafts = base.counts(scored, below)
    child = jax.vmap(lambda node: below(node).first())(jnp.arange(scored.tree.size + 1))
    child = jnp.where(drafts > 0, child, 0)
    return _Classes(first=first, child=child, drafts=drafts, drawable=drawable)


def _scores(key: PRNGKeyArray, scored: ScoredTree, classes: _Classes, competitions: int) -> _Scores:
    """Returns the scores of all nodes, computed from the root down. Consumes `key`."""
    depths = jnp.asarray(scored.tree.depth)
    p_and_q_at = base.at_nodes(scored, lambda node: scored.p_and_q(node, classes.child[node]))

    def cells_of(node: IntScalar, *intermediate: Probs) -> otm.Cells:
        p, q = intermediate or p_and_q_at(node)
        return otm.cells_of(p, q, LARGEST_RATIO)

    cells_at = base.at_nodes(scored, cells_of)

    def solve(
        tokens_D: PerDraft, node: IntScalar, k: IntScalar, score: FloatScalar, budget: FloatScalar
    ) -> _Node:
        p, q = p_and_q_at(node)

        def several() -> tuple[_Contest, Probs]:
            return _contest(p, q, cells_at(node, p, q), k, budget, tokens_D)

        contest, g = jax.lax.cond(
            _is_alone(k, budget), lambda: (zeros_like_output(several)[0], p), several
        )
        won_D = jnp.maximum(budget * g[tokens_D], jnp.finfo(g.dtype).tiny)
        ratio_D = jnp.where(q[tokens_D] > 0, score * q[tokens_D] / won_D, 0)
        residual = base.residual_mass(jnp.maximum(score * q - budget * g, 0), q, score)
        return sharding.whole(_Node(contest=contest, ratio=ratio_D, residual=residual))

    def alive(carry: tuple[IntScalar, _Scores]) -> BoolScalar:
        return jnp.any((carry[1].score > 0) & (depths == carry[0]))

    def step(carry: tuple[IntScalar, _Scores]) -> tuple[IntScalar, _Scores]:
        depth, scores = carry
        layer_key = jax.random.fold_in(key, scored.length + depth)
        return depth + 1, _compete(layer_key, scored, classes, solve, depth, scores, competitions)

    none = jnp.zeros(scored.tree.size + 1, scored.logits.dtype)
    start = jnp.int32(0), _Scores(score=none.at[0].set(1), budget=none, residual=none)
    end = base.repeat(scored, scored.tree.height, alive, step, start, absorbing=True)[1]
    # Without drafts, all of w q is left.
    return end._replace(residual=jnp.where(classes.drafts > 0, end.residual, end.score))


def _compete(
    key: PRNGKeyArray,
    scored: ScoredTree,
    classes: _Classes,
    solve: Callable[..., _Node],
    depth: IntScalar,
    scores: _Scores,
    competitions: int,
) -> _Scores:
    """Returns the scores after the drafts below the layer at `depth` have competed.

    It sets the scores of the next layer, and the budgets and residuals of this one. `solve` is a
    function of (tokens of the drafts, node, k, score, budget). Consumes `key`.
    """
    tree = scored.tree
    levels, parent = jnp.asarray(tree.level_table, jnp.int32), jnp.asarray(tree.parent, jnp.int32)
    nodes_W, drafts_D = levels[depth], levels[depth + 1]
    owner_D, first_D = classes.first[parent[drafts_D]], classes.first[drafts_D]
    tokens_D = scored.tokens[drafts_D]
    is_first_W = (nodes_W >= 0) & (classes.first[nodes_W] == nodes_W)
    score_W, k_W = jnp.where(is_first_W, scores.score[nodes_W], 0), classes.drafts[nodes_W]
    competing_W = jnp.where(k_W > 0, score_W, 0)
    budget_W = competing_W / jnp.maximum(jnp.sum(competing_W), jnp.finfo(score_W.dtype).tiny)
    solved_W: _Node = base.for_each_row(
        scored, competing_W > 0, functools.partial(solve, tokens_D), nodes_W, k_W, score_W, budget_W
    )

    belongs_WxD = (owner_D == nodes_W[:, None]) & (competing_W > 0)[:, None]
    competes_D = jnp.any(belongs_WxD, axis=0) & (drafts_D >= 0) & classes.drawable[drafts_D]
    node_D = jnp.argmax(belongs_WxD, axis=0)
    share_D = _shares(key, solved_W.contest, node_D, competes_D, competitions)
    ratio_D = jnp.take_along_axis(solved_W.ratio, node_D[None], axis=0)[0]
    won_D = jnp.sum(jnp.where(first_D[:, None] == first_D, share_D, 0), axis=1)
    below_D = jnp.where(competes_D & (first_D == drafts_D), won_D * jnp.minimum(ratio_D, 1), 0)
    residual_W = jnp.where(competing_W > 0, solved_W.residual, 0)
    return _Scores(
        score=_at_level(tree, depth + 1, below_D, scores.score),
        budget=_at_level(tree, depth, budget_W, scores.budget),
        residual=_at_level(tree, depth, residual_W, scores.residual),
    )


def _at_level(
    tree: Tree, depth: IntScalar, values_W: Float[Array, " width"], of_nodes: PerNode
) -> PerNode:
    """Returns `of_nodes` with the entries of one level replaced by `values_W`."""
    rank = np.concatenate([np.arange(len(nodes)) for nodes in tree.levels])
    return jnp.where(jnp.asarray(tree.depth) == depth, values_W[rank], of_nodes)


def _contest(
    p: Probs, q: Probs, cells: otm.Cells, k: IntScalar, budget: FloatScalar, tokens_D: PerDraft
) -> tuple[_Contest, Probs]:
    """Returns how drafts with tokens `tokens_D` compete, and the winner's distribution g."""
    kappa = _kappa(k, budget)
    winner = otm.winner_pmf(cells.p, cells.q, kappa)
    rho = otm.token_ratios(p, q, cells.of_token, otm.shared_ratios(cells, winner))
    contest = _Contest(
        kappa=kappa,
        matching=otm.matched(cells, winner),
        below=otm.cumulative(jnp, cells.p) - cells.p,
        above=otm.cumulative(jnp, cells.p[::-1])[::-1] - cells.p,
        mass=cells.p,
        cell=cells.of_token[tokens_D],
        rho=rho[tokens_D],
    )
    return contest, p * rho


def _competition_pmf(p: Probs, q: Probs, k: IntScalar, budget: FloatScalar) -> Probs:
    """Returns g, the winner's distribution at a node."""

    def several() -> tuple[Int[Array, " vocab"], Float[Array, " cells"]]:
        cells = otm.cells_of(p, q, LARGEST_RATIO)
        winner = otm.winner_pmf(cells.p, cells.q, _kappa(k, budget))
        return cells.of_token, otm.shared_ratios(cells, winner)

    def alone() -> tuple[Int[Array, " vocab"], Float[Array, " cells"]]:
        of_token, shared = zeros_like_output(several)
        return of_token, jnp.ones_like(shared)

    # The lookup is outside the branches: inside, XLA on a CPU recomputes each cell for each token.
    return p * otm.token_ratios(p, q, *jax.lax.cond(_is_alone(k, budget), alone, several))


def _is_alone(k: IntScalar, budget: FloatScalar) -> BoolScalar:
    """Returns whether the layer has a single draft, which then wins, so that g is p."""
    return (k == 1) & (budget == 1)


def _kappa(k: IntScalar, budget: FloatScalar) -> FloatScalar:
    """Returns k / b, kept finite: a budget below 1e-30 does not matter in practice."""
    return jnp.maximum(k / jnp.clip(budget, 1e-30, 1), 1)


def _shares(
    key: PRNGKeyArray,
    contests_W: _Contest,
    node_D: PerDraft,
    competes_D: Bool[Array, " drafts"],
    competitions: int,
) -> Float[Array, " drafts"]:
    """Returns the share of the competitions that each draft of the layer wins; consumes `key`."""
    D, alone_D = len(competes_D), competes_D.astype(contests_W.kappa.dtype)
    if D == 1:
        return alone_D
    uniforms_Dx3xM = lattice.uniforms(key, (D, 3), competitions)

    def drawn() -> Float[Array, " drafts"]:
        places = jax.vmap(functools.partial(_places, contests_W))
        places_DxM = places(uniforms_Dx3xM, node_D, jnp.arange(D))
        winner_M = jnp.argmax(jnp.where(competes_D[:, None], places_DxM, -jnp.inf), axis=0)
        wins_D = jnp.sum(winner_M == jnp.arange(D)[:, None], axis=1)
        return wins_D * jnp.asarray(1 / competitions, alone_D.dtype)

    return jax.lax.cond(jnp.sum(competes_D) > 1, drawn, lambda: alone_D)


def _places(
    contests_W: _Contest,
    uniforms_3xM: Float[Array, "3 competitions"],
    node: IntScalar,
    draft: IntScalar,
) -> Float[Array, " competitions"]:
    """Returns kappa log U of one draft in each competition, precise near U = 1 for large kappa."""
    contest: _Contest = jax.tree.map(lambda leaf: leaf[node], contests_W)
    level, move, place = uniforms_3xM
    cell = otm.moved(contest.matching, contest.cell[draft], contest.rho[draft], level, move)
    below = contest.below[cell] + place * contest.mass[cell]
    above = contest.above[cell] + (1 - place) * contest.mass[cell]
    near_1 = jnp.log1p(-jnp.minimum(above, 0.75))
    elsewhere = jnp.log(jnp.maximum(below, jnp.finfo(below.dtype).tiny))
    return contest.kappa * jnp.where(above < 0.5, near_1, elsewhere)


def _sweep(key: PRNGKeyArray, scored: ScoredTree, classes: _Classes, scores: _Scores) -> Selection:
    """Returns the path to the node where the sweep stops, and one more token; consumes `key`."""
    tree = scored.tree
    layer_key, node_key, token_key = jax.random.split(key, 3)
    depth = jnp.asarray(tree.depth)
    sums = jnp.zeros((2, tree.height + 1), scores.score.dtype)
    residual_L, score_L = sums.at[:, depth].add(jnp.stack([scores.residual, scores.score]))
    uniform_L = uniform(layer_key, (tree.height + 1,))
    stops_L = (uniform_L * (residual_L + jnp.maximum(1 - score_L, 0)) < residual_L).at[0].set(True)
    last = (tree.height - jnp.argmax(stops_L[::-1])).astype(jnp.int32)
    is_root = jnp.arange(tree.size + 1) == 0
    weights = jnp.where(depth == last, scores.residual, 0)
    # All weights are 0 only by rounding.
    node = draw(node_key, or_else(weights, is_root.astype(weights.dtype)))

    p, q = scored.p_and_q(node, classes.child[node])
    g = _competition_pmf(p, q, classes.drafts[node], scores.budget[node])
    left = jnp.maximum(scores.score[node] * q - scores.budget[node] * g, 0)
    token = base.last_token(token_key, or_else(left, q))
    return base.ending_at(scored, node, token, classes.drafts[classes.first])
