"""Acceptance by node and by number of drafts, observed in decoding (ERSD, section 5)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax import transport
from spectr_jax.decoding import Call
from spectr_jax.decoding.policy import probabilities


class Nodes(NamedTuple):
    """How often each node of a growing tree was accepted.

    Attributes:
      paths: the nodes in the order in which the tree grows, by child indices from the root.
      accepted: [seeds, N] in that order.
    """

    paths: Sequence[tuple[int, ...]]
    accepted: np.ndarray

    def tokens(self) -> np.ndarray:
        """[seeds, N] tokens a call of the tree of the first n nodes: a node does not feel those that come later."""
        return 1 + np.cumsum(self.accepted, axis=1)

    def mean(self) -> dict[tuple[int, ...], float]:
        """By path."""
        return dict(zip(self.paths, self.accepted.mean(axis=0).tolist(), strict=True))


def observe_nodes(call: Call) -> dict[str, jax.Array]:
    """For `generate`: sums over calls.

    Returns:
      nodes: [N + 1] how often each node was accepted, but for those behind an EOS; of the root, the calls.
      kl: KL(target, draft) at the root, in bits.
    """
    chosen, depth = call.chosen, jnp.arange(call.tree.height)
    is_eos = chosen.tokens[:-1] == call.policy.eos
    ended = jnp.cumsum(is_eos) - is_eos > 0
    accepted = (depth < chosen.emitted - 1) & ~ended
    counts = jnp.zeros(call.tree.size + 1).at[chosen.path].add(accepted).at[0].set(1)
    q = probabilities(call.logits[0], call.policy)
    return {"nodes": counts, "kl": jnp.sum(jnp.where(q > 0, q * jnp.log2(q / call.p[0]), 0))}


def _carriers(plan: transport.Plan, call: Call) -> dict[str, jax.Array]:
    """Of the drafts of a batch tree, the first k are given to the plan, for each k: how many carry its token."""
    drafts = call.tokens[1:]
    q = probabilities(call.logits[0], call.policy)

    def carriers(k):
        valid = jnp.arange(len(drafts)) < k
        token = plan.select(jax.random.fold_in(call.key, k), call.p[0], q, drafts, valid).token
        return jnp.zeros(len(drafts) + 1).at[jnp.sum(valid & (drafts == token))].add(1)

    return {"carriers": jax.vmap(carriers)(jnp.arange(len(drafts) + 1))}


def observe_kseq(call: Call) -> dict[str, jax.Array]:
    """For `generate`, on a batch tree of i.i.d. drafts: [N + 1, N + 1] counts of K-SEQ's carriers, by number of drafts."""
    return _carriers(transport.get("kseq"), call)


def observe_otm(call: Call) -> dict[str, jax.Array]:
    """The same for the exact optimal plan."""
    return _carriers(transport.get("otm"), call)


OBSERVE_CARRIERS = {"kseq": ("spectr", observe_kseq), "otm": ("otm", observe_otm)}
"""By plan: the method that runs it, and the observer."""
