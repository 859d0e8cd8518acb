"""Acceptance at the nodes that decoding visits: the plan's alpha_k against the optimum alpha_k* (SpecTr, section 5)."""

import jax
import jax.numpy as jnp

from spectr_jax.decoding import Call
from spectr_jax.decoding.policy import probabilities
from spectr_jax.transport import otm


def observe(call: Call) -> dict[str, jax.Array]:
    """For `generate`, on prefix trees: sums over the nodes at which one call chose among drafts.

    Returns:
      nodes: how many.
      accepted: at how many of them the token was a draft. Over `nodes`, the mean alpha_k of the plan.
      optimum: the sum of alpha_k*, the most that i.i.d. drafts from these laws can be accepted with.
    """
    chosen = call.chosen
    depth = jnp.arange(len(chosen.drafts))
    visited = (depth < chosen.emitted) & (chosen.drafts > 0)
    nodes = jnp.concatenate([jnp.zeros(1, jnp.int32), chosen.path])[: len(depth)]

    def optimum(node, k):
        if not len(call.p):  # No drafts at all.
            return jnp.zeros(())
        q = probabilities(call.logits[node], call.policy)
        p = call.p[jnp.asarray(call.tree.inner_rank)[node]]
        return otm.optimal_acceptance(p, q, jnp.maximum(k, 1))

    best = jax.vmap(optimum)(nodes, chosen.drafts)
    return {
        "nodes": jnp.sum(visited),
        # Where the token was a draft, the walk went on.
        "accepted": jnp.sum(visited & (depth < chosen.emitted - 1)),
        "optimum": jnp.sum(jnp.where(visited, best, 0)),
    }
