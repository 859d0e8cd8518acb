"""Tabulates which tokens a target expects after each token: its `Bigram`."""

from collections.abc import Iterable, Iterator

import jax.numpy as jnp
import numpy as np
import tqdm

from spectr_jax.data.corpus import open_sentences
from spectr_jax.decoding import Policy
from spectr_jax.distillation import labels
from spectr_jax.distillation import teacher as teaching
from spectr_jax.loading.by_name import Trained
from spectr_jax.models.bigram import Bigram, BigramConfig, token_dtype
from spectr_jax.models.frozen import check_context
from spectr_jax.models.vocabulary import Constant
from spectr_jax.utils.errors import UserError
from spectr_jax.utils.files import expanded

BATCH = 64
"""The number of sequences that are written or read at once."""


def rows_of_source(
    name: str, target: Trained, count: int, length: int, temperature: float, seed: int
) -> Iterable[np.ndarray]:
    """Returns the packed rows of a source, at most `BATCH` sequences at a time.

    Args:
      name: a folder that `spectr_jax.label` wrote, or a corpus; "" for chats that the target
        writes.
      target: the model with its tokenizer.
      count: number of chats, or of sentences of a corpus.
      length: tokens per row of chats and sentences.
      temperature: of chats.
      seed: of chats.

    Raises:
      UserError: the source cannot be read or has another vocabulary, its rows exceed the target's
        context, or the target has no chat template.
    """
    if name and (expanded(name) / labels.INDEX).exists():
        rows = labels.open_labels(name)
        if rows.vocabulary != target.tokenizer.vocabulary:
            hint = "give rows that this target wrote or read"
            raise UserError(f"text={name!r}: has another vocabulary than {target.name!r}; {hint}")
        check_context(f"text={name!r}", rows.length, target, "label shorter rows")
        starts = range(0, len(rows), BATCH)
        return (rows.take(np.arange(at, min(at + BATCH, len(rows)))) for at in starts)
    check_context(f"length={length}", length, target, "lower it")
    if name:
        texts = teaching.read_texts(open_sentences(name), target.tokenizer)
    elif target.tokenizer.template is None:
        raise UserError(f"text='': {target.name!r} has no chat template; give a corpus")
    elif not temperature:
        raise UserError("temperature=0: writes the same chat each time; give 0.7")
    else:
        policy = Policy(temperature, eos=target.tokenizer.eos)
        texts = teaching.conversations(target, length, policy, seed)
    row_type = labels.row_type(target.model.vocab_size, length, labelled=False)
    parts = (texts(at, min(at + BATCH, count)) for at in range(0, count, BATCH))
    return (teaching.pack_rows(part, row_type) for part in parts if part)


def labelled(rows_of: Iterable[np.ndarray], target: Trained) -> Iterator[np.ndarray]:
    """Yields rows with the target's labels."""
    fill = teaching.labeller(target)
    with tqdm.tqdm(unit="sequence", dynamic_ncols=True) as bar:
        for rows in rows_of:
            length = rows.dtype["tokens"].shape[0]
            filled = np.zeros(len(rows), labels.row_type(target.model.vocab_size, length))
            for field in ("tokens", "segments", "drafted"):
                filled[field] = rows[field]
            teaching.fill_rows(fill, filled, bar)
            yield filled


def tabulated(
    rows_of: Iterable[np.ndarray], vocab_size: int, context: int, ranks: int
) -> tuple[Bigram, int]:
    """Returns the bigram model of labelled rows, and the number of their tokens.

    The probability of a next token is the mean of the target's after all occurrences of a token,
    counting only the `ranks` likeliest at each. The mean over all tokens is added to each token's
    sum once, so that rare tokens have next tokens too.
    """
    pairs, mass = np.zeros(0, np.int64), np.zeros(0)
    counts = np.zeros(vocab_size)
    for rows in rows_of:
        used = rows["segments"] > 0
        tokens = rows["tokens"][used].astype(np.int64)
        counts += np.bincount(tokens, minlength=vocab_size)
        new = tokens[:, None] * vocab_size + rows["top"][used][:, :ranks]
        probs = np.exp(rows["log_probabilities"][used][:, :ranks].astype(np.float64))
        pairs, mass = _summed([pairs, new.ravel()], [mass, probs.ravel()])
    overall = np.bincount(pairs % vocab_size, mass, vocab_size) + 1 / vocab_size
    overall /= overall.sum()
    likeliest = np.argsort(-overall, kind="stable")[:ranks]
    everywhere = np.arange(vocab_size)[:, None] * vocab_size + likeliest
    again = np.tile(overall[likeliest], vocab_size)
    pairs, mass = _summed([pairs, everywhere.ravel()], [mass, again])
    order = np.lexsort((-mass, pairs // vocab_size))
    starts = np.searchsorted(pairs[order] // vocab_size, np.arange(vocab_size))
    best = order[starts[:, None] + np.arange(ranks)]  # [V, R]
    model = Bigram(BigramConfig(vocab_size=vocab_size, ranks=ranks, context=context))
    model.tokens = Constant(jnp.asarray(pairs[best] % vocab_size, token_dtype(vocab_size)))
    probs = mass[best] / (counts + 1)[:, None]
    model.log_probs[...] = jnp.asarray(np.log(probs), jnp.float32)
    return model, int(counts.sum())


def _summed(pairs: list[np.ndarray], masses: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct pairs in ascending order, and the sum of the masses of each."""
    distinct, places = np.unique(np.concatenate(pairs), return_inverse=True)
    return distinct, np.bincount(places, np.concatenate(masses))
