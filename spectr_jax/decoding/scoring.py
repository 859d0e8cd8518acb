"""Log-probabilities of given sequences under a model, without sampling: `score_all`.

Shape suffixes: B sequences, T tokens of a sequence, N = T - 1 tokens that the model reads, V
vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from spectr_jax.decoding.request import AnyModel, check_tokens, one_sequence
from spectr_jax.models.base import Model
from spectr_jax.models.frozen import Frozen, check_context, freeze
from spectr_jax.utils import hosts

SHORTEST, BATCH = 16, 2048
"""The least padded length of a sequence, and the number of padded tokens in one call of the model.
The logits of a call have `BATCH * V` numbers, or more if a sequence is longer than `BATCH`."""


class Scores(NamedTuple):
    """Scores of the tokens of sequences, each given those before it. The first token has none.

    Attributes:
      logprobs: [..., N] float32, the log-probability at temperature 1.
      greedy: [..., N], whether the token is the most probable one.
    """

    logprobs: Float[Array, "*batch time"]
    greedy: Bool[Array, "*batch time"]


def scores_of(model: Model, tokens_BxT: Int[Array, "batch time"]) -> Scores:
    """Returns the scores [B, T - 1] of all tokens but the first. It runs inside `jax.jit`.

    The model runs once, on all tokens but the last. Padding after a sequence does not affect the
    scores before it.
    """
    given_BxN, next_BxN = tokens_BxT[:, :-1], tokens_BxT[:, 1:]
    B, N = given_BxN.shape
    positions_BxN = jnp.broadcast_to(jnp.arange(N), (B, N))
    visible_BxNxN = jnp.broadcast_to(jnp.tri(N, dtype=bool), (B, N, N))
    logits_BxNxV, _ = model.extend(given_BxN, positions_BxN, visible_BxNxN)
    logits_BxNxV = logits_BxNxV.astype(jnp.float32)
    chosen_BxN = jnp.take_along_axis(logits_BxNxV, next_BxN[..., None], axis=-1)[..., 0]
    logprobs_BxN = chosen_BxN - jax.nn.logsumexp(logits_BxNxV, axis=-1)
    return Scores(logprobs=logprobs_BxN, greedy=jnp.argmax(logits_BxNxV, axis=-1) == next_BxN)


def score_all(target: AnyModel, sequences: Sequence[Sequence[int]]) -> list[Scores]:
    """Returns the scores of any number of sequences, such as prompts with given answers.

        logprobs, greedy = score_all(target, [[*prompt, *answer]])[0]
        print(logprobs[-len(answer):].sum())

    Sequences of similar lengths share a call of the model. Lengths are padded to powers of 2: there
    are at most log2(longest) programs.

    Args:
      target: a model, or what `freeze` or `load` returns.
      sequences: the tokens of each, BOS first. A sequence may have one token more than the context.

    Raises:
      UserError: a sequence is empty or too long, or a token is outside the vocabulary.
    """
    model = freeze(target)
    groups: dict[int, list[tuple[int, Int[np.ndarray, " time"]]]] = {}
    for index, sequence in enumerate(sequences):
        name = f"sequences[{index}]"
        tokens = one_sequence(name, sequence)
        check_tokens(name, tokens, 0, 0, model)
        check_context(f"{name} of {len(tokens)} tokens", len(tokens) - 1, model, "shorten it")
        padded = 1 << (max(len(tokens) - 1, SHORTEST) - 1).bit_length()
        groups.setdefault(min(padded, model.context), []).append((index, tokens))
    found: dict[int, Scores] = {}
    for length, group in groups.items():
        rows = max(1, BATCH // length)
        for start in range(0, len(group), rows):
            batch: Any = np.zeros((rows, length + 1), np.int32)
            for row, (_, tokens) in enumerate(members := group[start : start + rows]):
                batch[row, : len(tokens)] = tokens
            scores = hosts.fetch(_score(model, batch))
            for row, (index, tokens) in enumerate(members):
                found[index] = Scores(*(each[row, : len(tokens) - 1] for each in scores))
    return [found[index] for index in range(len(sequences))]


@jax.jit
def _score(model: Frozen, tokens_BxT: Int[Array, "batch time"]) -> Scores:
    return scores_of(model.merge(), tokens_BxT)
