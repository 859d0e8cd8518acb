"""Records each call of a generation: the drafted tree, the accepted path and the emitted tokens.

`generate(..., observe=recorder(capacity))` records on the device, and `read_calls` converts the
record to plain Python values:

    out = generate(..., observe=recorder(prompts.shape[1] + max_new_tokens))
    calls = read_calls(method.tree, out, row=0)
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spectr_jax.decoding.generate import Generation
from spectr_jax.decoding.loop import Call
from spectr_jax.decoding.policy import shaped
from spectr_jax.decoding.tree import Tree

ACCEPTED, CORRECTION, BONUS, TARGET = "accepted", "correction", "bonus", "target"
"""Origins of a token: an accepted draft; a correction after a rejection; a bonus token after a
leaf; the target alone, in a call without drafts."""


class Recorded(NamedTuple):
    """One call of the target, for one sequence.

    Attributes:
      start: the number of tokens before the call.
      tokens: [N + 1] by node; the root's is the last committed token. -1 where there is no draft.
      p: [N + 1] the draft's probability of each node's token given its parent; 1 for the root.
      q: [N + 1] the target's probability of the same.
      path: the node of each accepted draft, up to EOS or the limit.
      live: all nodes that spell the accepted tokens: the path and i.i.d. drafts that repeat it.
      emitted: the tokens that the call added to the sequence.
      origins: the origin of each emitted token.
    """

    start: int
    tokens: np.ndarray
    p: np.ndarray
    q: np.ndarray
    path: tuple[int, ...]
    live: tuple[int, ...]
    emitted: tuple[int, ...]
    origins: tuple[str, ...]


@functools.cache
def recorder(capacity: int) -> Callable[[Call], dict[str, jax.Array]]:
    """Returns an `observe` for `generate` that records every call, indexed by where it starts.

    Sequences have at most `capacity` tokens. The function is cached, so that `generate` does not
    recompile.
    """

    def record(call: Call) -> dict[str, jax.Array]:
        # `generate` sums these arrays over the calls, and no two calls start at the same length.
        return {
            name: jnp.zeros((capacity, *x.shape), x.dtype).at[call.scored.length].set(x)
            for name, x in observe_call(call).items()
        }

    return record


def observe_call(call: Call) -> dict[str, jax.Array]:
    """Returns the arrays of one call that `read_call` needs: an `observe` for `stream`."""
    scored, parent = call.scored, jnp.asarray(call.scored.tree.parent)
    q = shaped(scored.logits, scored.shaping)[parent, jnp.maximum(scored.tokens, 0)]
    return {
        "tokens": scored.tokens,
        "q": jnp.where(scored.tokens >= 0, q, 0),
        "p": scored.draft_probability(),
        "path": call.chosen.path,
        "chosen": call.chosen.tokens,
        "emitted": call.chosen.emitted,
    }


def read_calls(tree: Tree, generation: Generation, row: int) -> list[Recorded]:
    """Returns the calls of sequence `row`, in order; a `recorder` must have observed them."""
    observed = {name: np.asarray(values[row]) for name, values in generation.observed.items()}
    starts = np.flatnonzero(observed["emitted"]).tolist()
    ends = [*starts[1:], int(generation.lengths[row])]
    return [
        read_call(tree, {name: values[start] for name, values in observed.items()}, start, end)
        for start, end in zip(starts, ends, strict=True)
    ]


def read_call(tree: Tree, observed: dict[str, np.ndarray], start: int, end: int) -> Recorded:
    """Returns a call from the arrays of `observe_call`; the sequence grew from `start` to `end`
    tokens."""
    accepted, emitted = int(observed["emitted"]) - 1, end - start
    path = observed["path"][:accepted].tolist()
    tokens = np.asarray(observed["tokens"])
    last = _last_origin(tree, _live(tree, tokens, path)) if (tokens[1:] >= 0).any() else TARGET
    p, q = np.array(observed["p"]), np.array(observed["q"])
    p[0] = q[0] = 1
    return Recorded(
        start=start,
        tokens=tokens,
        p=p,
        q=q,
        path=tuple(path[:emitted]),
        live=tuple(_live(tree, tokens, path[:emitted])),
        emitted=tuple(observed["chosen"][:emitted].tolist()),
        origins=tuple([ACCEPTED] * accepted + [last])[:emitted],
    )


def _live(tree: Tree, tokens: np.ndarray, path: list[int]) -> list[int]:
    """Returns all nodes that spell the tokens of `path`, level by level."""
    live = [0]
    for level, node in zip(tree.levels[1:], path, strict=False):
        same = level[tokens[level] == tokens[node]].tolist()
        live += [one for one in same if tree.parent[one] in live]
    return live[1:]


def _last_origin(tree: Tree, live: list[int]) -> str:
    """Returns the origin of the token after the accepted ones, which all `live` nodes spell."""
    last = live[-1] if live else 0
    deepest = [node for node in (0, *live) if tree.depth[node] == tree.depth[last]]
    return CORRECTION if (tree.children_table[deepest, 0] >= 0).any() else BONUS
