"""Acceptance, observed in decoding: of a plan beside the optimum, by node, and by number of drafts.

Each `observe_*` is given to `generate` as `observe`: a function of one `Call`, whose results are summed over calls.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding import Call, Method
from spectr_jax.decoding.policy import ends
from spectr_jax.experiments.planning.prediction import RATIOS, WINNERS, ratio_cell, statistic
from spectr_jax.transport import Plan, otm


class Nodes(NamedTuple):
    """How often each node of a growing tree was accepted.

    Attributes:
      paths: the nodes in the order in which the tree grows, by child indices from the root.
      accepted: [seeds, N] in that order.
    """

    paths: Sequence[tuple[int, ...]]
    accepted: np.ndarray

    def tokens(self) -> np.ndarray:
        """Returns [seeds, N] tokens per call of the tree of the first n nodes: later nodes do not change the acceptance of
        earlier ones."""
        return 1 + np.cumsum(self.accepted, axis=1)

    def mean(self) -> dict[tuple[int, ...], float]:
        """Returns the acceptance of each node, by path."""
        return dict(zip(self.paths, self.accepted.mean(axis=0).tolist(), strict=True))


class PairAcceptance(NamedTuple):
    """The measured acceptance of a pair of models.

    Attributes:
      R: by method, [N] acceptance by child index, made descending.
      nodes: by (method, shape), the acceptance of each node of the largest tree of that shape.
      carriers: by method of i.i.d. drafts, [N + 1, N + 1] of its plan, as in `tree_search`.
      kl: KL(target, draft) in bits, the mean over calls; NaN if no method drafts without replacement.
    """

    R: dict[str, list[float]]
    nodes: dict[tuple[str, str], Nodes]
    carriers: dict[str, np.ndarray]
    kl: float


def observe_accepted(call: Call) -> dict[str, jax.Array]:
    """For `generate`, at next to no cost: sums over the nodes at which one call chose among drafts.

    Returns:
      nodes: the number of such nodes.
      accepted: at how many of them the token was a draft. Over `nodes`, the mean alpha_k of the plan.
    """
    visited, depth = _visited(call)
    # Where the token was a draft, the walk went on.
    return {
        "nodes": jnp.sum(visited),
        "accepted": jnp.sum(visited & (depth < call.chosen.emitted - 1)),
    }


def observe_optimum(call: Call) -> dict[str, jax.Array]:
    """For `generate`, on prefix trees: the same, and at each of these nodes an `otm.acceptance`, which takes time.

    Returns:
      nodes: the number of such nodes.
      optimum: the sum of alpha_k*, the largest acceptance that any plan has for i.i.d. drafts from these distributions.
    """
    (visited, depth), drafts, scored = _visited(call), call.chosen.drafts, call.scored
    if not len(scored.p):  # No drafts at all.
        return {"nodes": jnp.sum(visited), "optimum": jnp.zeros(())}
    nodes = jnp.concatenate([jnp.zeros(1, jnp.int32), call.chosen.path])[: len(depth)]

    def optimum(node, k):
        p = scored.p[jnp.asarray(scored.tree.inner_rank)[node]]
        return otm.acceptance(p, scored.q(node), jnp.maximum(k, 1))

    best = jax.vmap(optimum)(nodes, drafts)
    return {"nodes": jnp.sum(visited), "optimum": jnp.sum(jnp.where(visited, best, 0))}


def _visited(call: Call) -> tuple[jax.Array, jax.Array]:
    """Returns [height + 1] bool, the depths at which there was a choice among drafts, and the depths."""
    depth = jnp.arange(len(call.chosen.drafts))
    return (depth < call.chosen.emitted) & (call.chosen.drafts > 0), depth


@functools.cache
def observe_positions(capacity: int) -> Callable[[Call], dict[str, jax.Array]]:
    """Returns an `observe` that says where drafts are accepted: at which level of the tree, and how far in a sequence.

    Nothing that follows EOS counts. The same object for the same capacity, so that nothing is compiled again.

    Args:
      capacity: the most tokens of a sequence, prompt included.

    Returns:
      A function that returns `reached` [height], how often a token was chosen among drafts of each level, and `accepted`
      [height], how often it was one of them; `calls`, `chosen_at` and `accepted_at`, all [capacity], count the calls that
      start after so many tokens, and the tokens of these calls that were chosen among drafts, and that were drafts.
    """

    def observe(call: Call) -> dict[str, jax.Array]:
        (visited, depth), tokens = _visited(call), call.chosen.tokens
        is_eos = ends(tokens, call.scored.policy)
        reached = (visited & ~(jnp.cumsum(is_eos) - is_eos > 0))[:-1]
        accepted = reached & (depth < call.chosen.emitted - 1)[:-1]
        start = jnp.zeros(capacity, jnp.int32).at[call.scored.length]
        return {
            "reached": reached,
            "accepted": accepted,
            "calls": start.set(1),
            "chosen_at": start.set(jnp.sum(reached)),
            "accepted_at": start.set(jnp.sum(accepted)),
        }

    return observe


def observe_nodes(call: Call) -> dict[str, jax.Array]:
    """Returns an `observe` for any tree: sums over calls.

    Returns:
      nodes: [N + 1] how often each node was accepted, except after EOS; for the root, the number of calls.
      kl: KL(target, draft) at the root, in bits.
    """
    chosen, scored, depth = call.chosen, call.scored, jnp.arange(call.scored.tree.height)
    is_eos = ends(chosen.tokens[:-1], scored.policy)
    ended = jnp.cumsum(is_eos) - is_eos > 0
    accepted = (depth < chosen.emitted - 1) & ~ended
    counts = jnp.zeros(scored.tree.size + 1).at[chosen.path].add(accepted).at[0].set(1)
    q = scored.q(0)
    return {"nodes": counts, "kl": jnp.sum(jnp.where(q > 0, q * jnp.log2(q / scored.p[0]), 0))}


@functools.cache
def observe_drafts(
    methods: tuple[Method, ...], kind: str | None = None
) -> Callable[[Call], dict[str, jax.Array]]:
    """Returns an `observe` for `generate` on a batch tree of K i.i.d. drafts: the first k are given to the plan of each
    method, for each k. The same object for the same methods, so that nothing is compiled anew.

    Args:
      methods: whose drafts are i.i.d., of different names; their trees do not count.
      kind: of `prediction.statistic`, for all of them; by default each method's own.

    Returns:
      A function that returns by method's name, for CARRIERS, [K + 1, K + 1] counts of how many of the k carry the token; for
      WINNERS, [K + 1, R, K + 1] counts of the cell of the winner's ratio (`planning.prediction`) and of the drafts that are
      its token.
    """

    def observe(call: Call) -> dict[str, jax.Array]:
        drafts = call.scored.tokens[1:]
        p, q = call.scored.p[0], call.scored.q(0)

        def carriers(plan: Plan, k):
            valid = jnp.arange(len(drafts)) < k
            token = plan.select(jax.random.fold_in(call.key, k), p, q, drafts, valid).token
            return jnp.zeros(len(drafts) + 1).at[jnp.sum(valid & (drafts == token))].add(1)

        def winners(plan: Plan, k):
            valid = jnp.arange(len(drafts)) < k
            winner, g = plan.win(jax.random.fold_in(call.key, k), p, q, drafts, valid)
            token = drafts[winner]
            cell = ratio_cell(q[token] / jnp.maximum(g[token], jnp.finfo(g.dtype).tiny))
            return (
                jnp.zeros((RATIOS, len(drafts) + 1))
                .at[cell, jnp.sum(valid & (drafts == token))]
                .add(1)
            )

        found = {}
        for method in methods:
            verifier: Any = method.verifier  # It has a statistic, and so a plan.
            count = winners if (kind or statistic(method)) == WINNERS else carriers
            # One k after the other: some plans need much room.
            found[method.name] = jax.lax.map(
                functools.partial(count, verifier.plan), jnp.arange(len(drafts) + 1)
            )
        return found

    return observe


def shares(counts: np.ndarray) -> np.ndarray:
    """Counts by number of drafts, as probabilities: each [i] sums to 1."""
    return counts / counts.reshape(len(counts), -1).sum(axis=1).reshape(
        -1, *[1] * (counts.ndim - 1)
    )
