"""Held-out sentences and a model's loss on them."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from spectr_jax.data.batches import batch_of
from spectr_jax.data.packing import pack_rows
from spectr_jax.data.tokenizer import Tokenizer
from spectr_jax.utils import hosts, sharding
from spectr_jax.utils.errors import UserError


class Heldout(NamedTuple):
    """Held-out sentences: this process's rows of each batch, and the number of characters of all
    sentences, line ends included."""

    batches: list[dict[str, np.ndarray]]
    characters: int


def pack_heldout(
    sentences: Iterable[str], tokenizer: Tokenizer, *, rows: int, length: int, name: str = ""
) -> Heldout:
    """Returns the sentences that fit rows of `length` tokens, in batches of `rows` rows over all
    processes. The last batch is padded.

    Raises:
      UserError: no sentence of the corpus `name` fits.
    """
    kept = [sentence for sentence in sentences if len(tokenizer.encode(sentence)) < length]
    if not kept:
        raise UserError(
            f"data.heldout={name!r}: no sentence fits {length} tokens; raise model.context"
        )
    packed, mine = pack_rows(kept, tokenizer, length), hosts.own_share(rows)
    padded = np.pad(packed, ((0, -len(packed) % rows), (0, 0)))  # 0 is padding.
    batches = [batch_of(part[mine]) for part in padded.reshape(-1, rows, length)]
    return Heldout(batches, sum(len(sentence) + 1 for sentence in kept))


def evaluate(eval_step: Callable, params: Any, heldout: Heldout, mesh: Mesh) -> dict[str, float]:
    """Returns nats per token and bits per character, as exact means over the real tokens.

    `eval_step` maps (params, batch), both on `mesh`, to summed nats, summed nats of an early exit
    (0 if none), and the number of tokens.
    """
    sums = np.zeros(3)
    for batch in heldout.batches:
        sums += [float(total) for total in eval_step(params, sharding.put_rows(mesh, batch))]
    nats, exit_nats, tokens = sums
    scores = {
        "eval_nats_per_token": float(nats / tokens),
        "eval_bits_per_character": float(nats / math.log(2) / heldout.characters),
    }
    if exit_nats:
        scores["eval_exit_nats_per_token"] = float(exit_nats / tokens)
    return scores
