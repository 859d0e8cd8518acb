"""Observes acceptance in decoding: relative to the optimum, by node, and by number of drafts.

Each `observe_*` is, or returns, an `observe` for `generate`: a function of one `Call` whose results
are summed over calls. Those that it returns are cached, so that `generate` does not recompile.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding import Call, Method
from spectr_jax.decoding.policy import ends
from spectr_jax.transport import Plan, otm


class Nodes(NamedTuple):
    """The acceptance of each node of a growing tree.

    Attributes:
      paths: the nodes in the order in which the tree grows, as child indices from the root.
      accepted: [seeds, N] the acceptance of each node, in that order. Adding a node does not change
        the acceptance of the nodes before it.
    """

    paths: Sequence[tuple[int, ...]]
    accepted: np.ndarray


class PairAcceptance(NamedTuple):
    """The measured acceptance of a pair of models.

    Attributes:
      R: by method, [N] acceptance by child index, made descending.
      nodes: by (method, shape), the acceptance of each node of the largest tree of that shape.
      carriers: by method with i.i.d. drafts, `carriers` [N + 1, N + 1] as in `tree_search`.
      kl: KL(target, draft) in bits, averaged over calls; NaN without a method that drafts without
        replacement.
    """

    R: dict[str, list[float]]
    nodes: dict[tuple[str, str], Nodes]
    carriers: dict[str, np.ndarray]
    kl: float


def observe_accepted(call: Call) -> dict[str, jax.Array]:
    """Returns how often one call chose among drafts, and how often it accepted one.

    Returns:
      nodes: the number of nodes where the call chose among drafts.
      accepted: the number of these nodes where it chose a draft; accepted / nodes is the mean
        acceptance alpha_k of the plan.
    """
    visited, depth = _visited(call)
    accepted = visited & (depth < call.chosen.emitted - 1)  # All emitted tokens but the last.
    return {"nodes": jnp.sum(visited), "accepted": jnp.sum(accepted)}


def observe_optimum(call: Call) -> dict[str, jax.Array]:
    """Returns the summed optimal acceptance at the nodes of `observe_accepted`. It is slow, and for
    i.i.d. drafts on prefix trees.

    Returns:
      nodes: the number of nodes where the call chose among drafts.
      optimum: the sum over them of alpha_k*, the largest acceptance of any plan for k i.i.d.
        drafts (`otm.acceptance`).
    """
    (visited, depth), drafts, scored = _visited(call), call.chosen.draft_counts, call.scored
    nodes = jnp.concatenate([jnp.zeros(1, jnp.int32), call.chosen.path])[: len(depth)]

    def optimum(node, k):
        p = scored.p_of(jnp.asarray(scored.tree.inner_rank)[node])
        return otm.acceptance(p, scored.q(node), jnp.maximum(k, 1))

    best = jax.vmap(optimum)(nodes, drafts)
    return {"nodes": jnp.sum(visited), "optimum": jnp.sum(jnp.where(visited, best, 0))}


def _visited(call: Call) -> tuple[jax.Array, jax.Array]:
    """Returns whether each depth [height + 1] had a choice among drafts, and the depths."""
    depth = jnp.arange(len(call.chosen.draft_counts))
    return (depth < call.chosen.emitted) & (call.chosen.draft_counts > 0), depth


@functools.cache
def observe_positions(capacity: int) -> Callable[[Call], dict[str, jax.Array]]:
    """Returns an `observe` that counts acceptance by tree level and by position in the sequence.

    Tokens after EOS do not count.

    Args:
      capacity: the largest number of tokens of a sequence, prompt included.

    Returns:
      A function that returns a dictionary:

      reached [height]: how often a token was chosen among the drafts of each level.
      accepted [height]: how often a draft of each level was chosen.
      calls [capacity]: the number of calls that start at each length.
      chosen_at [capacity]: the tokens of those calls that were chosen among drafts.
      accepted_at [capacity]: the tokens of those calls that were drafts.
    """

    def observe(call: Call) -> dict[str, jax.Array]:
        (visited, depth), tokens = _visited(call), call.chosen.tokens
        is_eos = ends(tokens, call.eos)
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
    """Returns which nodes of any tree one call accepted, and the divergence at the root.

    Returns:
      nodes: [N + 1] 1 for the root and for each accepted node up to EOS, else 0.
      kl: KL(target, draft) at the root, in bits.
    """
    chosen, scored, depth = call.chosen, call.scored, jnp.arange(call.scored.tree.height)
    is_eos = ends(chosen.tokens[:-1], call.eos)
    ended = jnp.cumsum(is_eos) - is_eos > 0
    accepted = (depth < chosen.emitted - 1) & ~ended
    counts = jnp.zeros(scored.tree.size + 1).at[chosen.path].add(accepted).at[0].set(1)
    q = scored.q(0)
    return {"nodes": counts, "kl": jnp.sum(jnp.where(q > 0, q * jnp.log2(q / scored.p_of(0)), 0))}


@functools.cache
def observe_drafts(methods: tuple[Method, ...]) -> Callable[[Call], dict[str, jax.Array]]:
    """Returns an `observe` for `generate` on a batch tree of K i.i.d. drafts. For each k up to K it
    gives each method's plan the first k drafts and counts what the plan chooses.

    Args:
      methods: methods with i.i.d. drafts, a plan and different names; their trees are ignored.

    Returns:
      A function that returns counts [K + 1, K + 1] by method name: how many of the k drafts carry
      the chosen token.
    """

    def observe(call: Call) -> dict[str, jax.Array]:
        drafts = call.scored.tokens[1:]
        (p, q), K = call.scored.p_and_q(jnp.int32(0), jnp.int32(1)), len(drafts)
        drawable = call.scored.draft_probability()[1:] > 0

        def carriers(plan: Plan, k):
            valid = drawable & (jnp.arange(K) < k)
            token = plan.select(jax.random.fold_in(call.key, k), p, q, drafts, valid).token
            return jnp.zeros(K + 1).at[jnp.sum(valid & (drafts == token))].add(1)

        counts = {}
        for method in methods:
            verifier: Any = method.verifier  # It has a plan.
            # One k at a time, because some plans need much memory.
            of_plan = functools.partial(carriers, verifier.plan)
            counts[method.name] = jax.lax.map(of_plan, jnp.arange(K + 1))
        return counts

    return observe
